package input

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

func dataset(t *testing.T, text string) (*Dataset, string) {
	t.Helper()
	return preferences(t, text, Preference{})
}

func preferences(t *testing.T, text string, p Preference) (*Dataset, string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "rows.jsonl")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	d := &Dataset{File: file, Path: "rows.jsonl", PromptField: "prompt", ReferenceField: "answer", Preference: p}
	return d, read(t, d)
}

// read gives the problems of a file.
func read(t *testing.T, d *Dataset) string {
	t.Helper()
	var problems problem.List
	if err := d.Read(&problems); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, p := range problems.Sorted() {
		fmt.Fprintf(&b, "%d:%d %s\n", p.GetLine(), p.GetColumn(), p.GetMessage())
	}
	return b.String()
}

func TestRowsAreCountedWhateverEndsTheLines(t *testing.T) {
	t.Parallel()
	row := `{"prompt": "1+1=", "answer": "2"}`
	for text, want := range map[string]uint64{
		row: 1, row + "\n": 1, row + "\r\n" + row + "\r\n": 2, row + "\n" + row: 2, row + "\n\n \r\n\t": 1, // blank lines at the end are nothing
		`{"prompt": "` + strings.Repeat("x", 3<<20) + "\"}\n" + row: 2, // longer than the reader's buffer
	} {
		d, problems := dataset(t, text)
		if d.Rows != want || problems != "" {
			t.Errorf("%.40q: %d rows, want %d; %s", text, d.Rows, want, problems)
		}
		if d.Digest != id.Content([]byte(text)) || d.Bytes != uint64(len(text)) {
			t.Errorf("%.40q: digest %s of %d bytes", text, d.Digest, d.Bytes)
		}
	}
}

func TestBlankLinesBetweenRowsAreRefused(t *testing.T) {
	t.Parallel()
	row := `{"prompt": "1+1=", "answer": "2"}` + "\n"
	_, problems := dataset(t, row+"\n"+row+"\n")
	if want := "2:1 the line is empty\n"; problems != want {
		t.Errorf("got %q, want %q", problems, want)
	}
}

func TestColumnsCountCharacters(t *testing.T) {
	t.Parallel()
	_, problems := dataset(t, `{"größe": "日本", "prompt" "x"}`+"\n"+`{"größe": "日本", "prompt": 3}`+"\n{\"prompt\": \"\xff\"}\n")
	want := "1:26 the row is not JSON: invalid character '\"' after object key\n" +
		"2:17 `prompt` is a number, not a string or a list of messages\n3:13 the row is not UTF-8\n"
	if problems != want {
		t.Errorf("got\n%swant\n%s", problems, want)
	}
}

func TestProblemsOfOneKindAreCounted(t *testing.T) {
	t.Parallel()
	d, problems := dataset(t, strings.Repeat("{\"prompt\": 3}\n", 1000)+"{\"prompt\": \"x\"}\n{\"prompt\": \"y\", \"answer\": \"z\"}\n")
	if got := strings.Count(problems, "\n"); got != sameShown+1 || !strings.Contains(problems, "1002:0 and 995 more problems") {
		t.Errorf("got\n%s", problems)
	}
	if len(d.First) != 2 || d.First[1].Prompt != "y" || d.Reference(d.First[1]) != "z" || d.Reference(d.First[0]) != "" {
		t.Errorf("first rows: %+v", d.First)
	}
}

// A parser would take the last of two values.
func TestKeysThatARowHasTwice(t *testing.T) {
	t.Parallel()
	for row, want := range map[string]string{
		`{"prompt": "1", "answer": "2", "prompt": "3"}`:                            "1:32 the row has \"prompt\" twice: only the last one would be used\n",
		`{"prompt": "a: \"b\": {", "x": {"y": 1, "y": [2, {"x": 3}]}, "z": [":"]}`: "",
		`{"größe": 1, "prompt": "1", "gr\u00f6\u00dfe": 2}`:                        "1:29 the row has \"größe\" twice: only the last one would be used\n",
	} {
		if _, problems := dataset(t, row+"\n"); problems != want {
			t.Errorf("%s\n got %swant %s", row, problems, want)
		}
	}
}

func TestAByteOrderMarkIsNamed(t *testing.T) {
	t.Parallel()
	_, problems := dataset(t, "\ufeff{\"prompt\": \"1\"}\n{\"prompt\": \"\ufeff2\"}\n")
	if want := "1:1 the file begins with a byte order mark (BOM), which is not JSON\n"; problems != want {
		t.Errorf("got %q", problems)
	}
}

// An empty text is not trained on. The fix does not suggest quotes.
func TestAnEmptyCompletionIsFixed(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "rows.jsonl")
	for _, c := range []struct {
		d         Dataset
		row, want string
	}{
		{Dataset{AnswerField: "answer"}, `{"prompt": "1", "answer": ""}`, "remove the row, or write the answer"},
		{Dataset{AnswerField: "answer"}, `{"prompt": "1", "answer": 2}`, "write the answer as a string"},
		{Dataset{Preference: Preference{Completion: "c", Label: "l"}}, `{"prompt": "1", "c": "", "l": true}`, "remove the row, or write the completion"},
		{
			Dataset{Preference: Preference{Chosen: "a", Rejected: "b"}}, `{"prompt": "1", "a": [{"role": "assistant", "text": "2"}], "b": "3"}`,
			"write a string, or messages like {\"role\": \"assistant\", \"content\": \"...\"}",
		},
	} {
		if err := os.WriteFile(file, []byte(c.row), 0o600); err != nil {
			t.Fatal(err)
		}
		d, problems := c.d, problem.List{}
		d.File, d.Path, d.PromptField = file, "rows.jsonl", "prompt"
		if err := d.Read(&problems); err != nil {
			t.Fatal(err)
		}
		if got := problems.Sorted(); len(got) != 1 || got[0].GetFix() != c.want {
			t.Errorf("%s: %v", c.row, got)
		}
	}
}

func TestARowThatCannotTravelIsRefused(t *testing.T) {
	t.Parallel()
	_, problems := dataset(t, `{"prompt": "`+strings.Repeat("x", maxRow)+"\"}\n")
	if !strings.Contains(problems, "the limit is 8388608") {
		t.Error(problems)
	}
}

func TestLines(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "rows.jsonl")
	if err := os.WriteFile(file, []byte("one\ntwo\r\nthree"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := Lines(file, []uint64{2, 3, 4})
	if len(got) != 2 || got[2] != "two" || got[3] != "three" {
		t.Errorf("%v", got)
	}
}

func TestRelative(t *testing.T) {
	t.Parallel()
	for _, c := range [][4]string{
		{"/a/b", "/a/b/c.py", "c.py", "c.py"}, {"/a/b", "/a/c.py", "../c.py", "../c.py"}, {"/a/b", "/x/c.py", "/x/c.py", "/x/c.py"},
	} {
		if got := Relative(c[0], c[1], c[2]); got != c[3] {
			t.Errorf("Relative(%q, %q, %q) = %q", c[0], c[1], c[2], got)
		}
		if got := Resolve(c[0], c[2]); got != c[1] {
			t.Errorf("Resolve(%q, %q) = %q", c[0], c[2], got)
		}
	}
}

func TestConversations(t *testing.T) {
	t.Parallel()
	const talk = `{"prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}`
	const question = `{"prompt": [{"role": "user", "content": "1"}]}`
	for _, c := range []struct {
		name  string
		d     Dataset
		row   string
		wants string
	}{
		{"trained on whole", Dataset{AnswerField: "answer"}, talk, ""},
		{"nothing to train on", Dataset{AnswerField: "answer"}, question,
			"1:2 `prompt` does not end with a message of the assistant, and the row has no `answer`\n"},
		{"a call of a tool", Dataset{}, `{"prompt": [{"role": "assistant", "content": null, "tool_calls": [{}]}, {"role": "tool", "content": "1"}]}`, ""},
		{"no content", Dataset{}, `{"prompt": [{"role": "user", "content": null}]}`, "1:2 message 0 of `prompt` has no string `content`\n"},
		{"another role", Dataset{}, `{"prompt": [{"role": "human", "content": "1"}]}`, "1:2 message 0 of `prompt` has the unknown role \"human\"\n"},
		{"a prompt to sample from", Dataset{}, question, ""},
		{"held out", Dataset{Asked: true}, question, ""},
		{"held out, answered", Dataset{Asked: true}, talk, "1:2 `prompt` ends with a message of the assistant, but the policy has to answer it\n"},
	} {
		file := filepath.Join(t.TempDir(), "rows.jsonl")
		if err := os.WriteFile(file, []byte(c.row+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		d := c.d
		d.File, d.Path, d.PromptField, d.ChatTemplate = file, "rows.jsonl", "prompt", true
		if problems := read(t, &d); problems != c.wants {
			t.Errorf("%s: got %swant %s", c.name, problems, c.wants)
		}
	}
}

func TestPreferencesThatCannotBeLearnedFrom(t *testing.T) {
	t.Parallel()
	pair := Preference{Chosen: "good", Rejected: "bad", Algorithm: "dpo"}
	margin := Preference{Chosen: "good", Rejected: "bad", Margin: "by", Algorithm: "reward_model"}
	label := Preference{Completion: "text", Label: "ok", Algorithm: "kto"}
	for _, c := range []struct {
		p         Preference
		row, want string
	}{
		{pair, `{"prompt": "1", "good": "2", "bad": "3"}`, ""},
		{pair, `{"prompt": "1", "good": "2"}`, "1:1 the row has no `bad`\n"},
		{pair, `{"prompt": "1", "good": "2", "bad": "2"}`, ""},
		{pair, `{"prompt": "1", "good": "", "bad": "2"}`, "1:17 `good` is empty, but [algorithm.dpo] trains on it\n"},
		{pair, `{"prompt": "1", "good": ["x"], "bad": "2"}`, "1:17 `good` is not a list of messages with the strings `role` and `content`\n"},
		{margin, `{"prompt": "1", "good": "2", "bad": "3", "by": 0.5}`, ""},
		{margin, `{"prompt": "1", "good": "2", "bad": "3", "by": "much"}`, "1:42 `by` is a string, not a number\n"},
		{margin, `{"prompt": "1", "good": "2", "bad": "3", "by": 0}`, ""},
		{margin, `{"prompt": "1", "good": "2", "bad": "3", "by": -0.5}`, "1:42 `by` is -0.5, but a margin must be at least 0\n"},
		{label, `{"prompt": "1", "text": "2", "ok": false}`, ""},
		{label, `{"prompt": "1", "text": "2", "ok": 1}`, "1:30 `ok` is 1, not true or false\n"},
		{label, `{"prompt": "1", "text": "2"}`, "1:1 the row has no `ok`\n"},
	} {
		if _, problems := preferences(t, c.row+"\n", c.p); problems != c.want {
			t.Errorf("%s\n got %swant %s", c.row, problems, c.want)
		}
	}
}

// Published preference data has pairs of equal completions; the planner counts them.
func TestTiesAreCounted(t *testing.T) {
	t.Parallel()
	const tie, pair = `{"prompt": "1", "good": "2", "bad": "2"}` + "\n", `{"prompt": "1", "good": "2", "bad": "3"}` + "\n"
	d, problems := preferences(t, pair+tie+pair+tie, Preference{Chosen: "good", Rejected: "bad", Algorithm: "dpo"})
	if problems != "" || d.Ties != 2 || d.Tie != 2 {
		t.Errorf("%d ties, the first in row %d; %s", d.Ties, d.Tie, problems)
	}
}

func TestUnknownRolesGetASuggestion(t *testing.T) {
	t.Parallel()
	for role, want := range map[string]string{"usr": `write "user"`, "human": `write "user"`, "GPT": `write "assistant"`, "assistent": `write "assistant"`, "zzz": `write "system", "user", "assistant", or "tool"`} {
		if got := fixRole(role); got != want {
			t.Errorf("%s: %s, want %s", role, got, want)
		}
	}
}

// A problem of a row that was made from a CSV file is placed in that file.
func TestProblemsOfACSVNameItsLineAndColumn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	table := filepath.Join(dir, "kto.csv")
	if err := os.WriteFile(table, []byte("\xef\xbb\xbfprompt,text,ok\n\"two\nlines\",x,true\n1,y,yes\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "rows.jsonl")
	if err := os.WriteFile(file, []byte(`{"prompt": "two\nlines", "text": "x", "ok": true}`+"\n"+`{"prompt": "1", "text": "y", "ok": "yes"}`+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	d := &Dataset{File: file, Path: "kto.csv", PromptField: "prompt", Table: table, Preference: Preference{Completion: "text", Label: "ok", Algorithm: "kto"}}
	var problems problem.List
	if err := d.Read(&problems); err != nil {
		t.Fatal(err)
	}
	got := problems.Sorted()
	if len(got) != 1 || got[0].GetLine() != 4 || got[0].GetColumn() != 5 || got[0].GetExcerpt() != "1,y,yes" || !strings.HasSuffix(got[0].GetFix(), "a CSV file may also have 1 and 0") {
		t.Errorf("%v", got)
	}
}

// Rows of the other kind are named once a file, with the setting or the algorithm that takes them.
func TestPreferencesOfTheOtherKind(t *testing.T) {
	t.Parallel()
	pair := Preference{Chosen: "good", Rejected: "bad", Algorithm: "dpo", Others: [2]string{"text", "ok"}, OthersFix: "take KTO"}
	label := Preference{Completion: "text", Label: "ok", Algorithm: "kto", Others: [2]string{"good", "bad"}, OthersFix: "pair them"}
	const rowOfPair, rowOfLabel = `{"prompt": "1", "good": "2", "bad": "3"}` + "\n", `{"prompt": "1", "text": "2", "ok": true}` + "\n"
	for _, c := range []struct {
		p         Preference
		row, want string
	}{
		{pair, rowOfLabel, "1:1 the row is a completion with a label (`text`, `ok`), but [algorithm.dpo] needs `good` and `bad`\n"},
		{label, rowOfPair, "1:1 the row is a pair of completions (`good`, `bad`), but [algorithm.kto] needs `text` and `ok`\n"},
		{pair, rowOfPair, ""},
		{label, rowOfLabel, ""},
	} {
		if _, problems := preferences(t, strings.Repeat(c.row, 20), c.p); problems != c.want {
			t.Errorf("%s\n got %swant %s", c.row, problems, c.want)
		}
	}
}

// A UTF-16 file is reported as one problem, because none of its lines can be read or quoted.
func TestUTF16IsNamedOnce(t *testing.T) {
	t.Parallel()
	const rows = "{\"prompt\": \"1\"}\r\n{\"prompt\": \"2\"}\r\n"
	var little, big strings.Builder
	for _, c := range []byte(rows) {
		little.Write([]byte{c, 0})
		big.Write([]byte{0, c})
	}
	for text, want := range map[string]string{
		"\xff\xfe" + little.String(): "UTF-16", "\xfe\xff" + big.String(): "UTF-16", little.String(): "UTF-16LE", big.String(): "UTF-16BE",
	} {
		file := filepath.Join(t.TempDir(), "rows.jsonl")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		d, problems := &Dataset{File: file, Path: "rows.jsonl", PromptField: "prompt"}, problem.List{}
		if err := d.Read(&problems); err != nil {
			t.Fatal(err)
		}
		got := problems.Sorted()
		if len(got) != 1 || got[0].GetExcerpt() != "" || got[0].GetLine() != 1 || !strings.HasPrefix(got[0].GetMessage(), "the file is "+want+", not UTF-8") ||
			!strings.HasSuffix(got[0].GetFix(), "iconv -f "+want+" -t UTF-8 rows.jsonl > utf8.jsonl") {
			t.Errorf("%.4q: %v", text, got)
		}
	}
}

// TestProblemsOfRowsCanTravel checks that quoted parts of a row are valid UTF-8, like every text in
// a message must be.
func TestProblemsOfRowsCanTravel(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "rows.jsonl")
	if err := os.WriteFile(file, []byte("{\"prompt\": \"1\"}\n{\"prompt\": \"\xe9\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	d, problems := &Dataset{File: file, Path: "rows.jsonl", PromptField: "prompt"}, problem.List{}
	if err := d.Read(&problems); err != nil {
		t.Fatal(err)
	}
	sorted := problems.Sorted()
	if len(sorted) != 1 || sorted[0].GetLine() != 2 || sorted[0].GetMessage() != "the row is not UTF-8" {
		t.Fatalf("problems %v", sorted)
	}
	if _, err := proto.Marshal(sorted[0]); err != nil {
		t.Error(err)
	}
}
