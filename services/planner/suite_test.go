package planner

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// Rows and rewards of the suites of a run are checked and pinned like its own.
func TestSuitesOfARunArePinned(t *testing.T) {
	t.Parallel()
	dir := project(t, "def exact(samples): return [float(s.completion == '2') for s in samples]\n")
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("sums.jsonl", `{"prompt": "1+1=", "answer": "2", "page": 1}`+"\n")
	write("judge.py", "def right(samples): return [float(s.completion == s.row['answer']) for s in samples]\n")
	s := server(t)
	suites := []string{
		"eval.every_steps=2", "eval.suites.sums.data=\"sums.jsonl\"", "eval.suites.sums.cluster=\"page\"", "eval.suites.again.data=\"sums.jsonl\"",
		"eval.suites.again.reward={plugin=\"judge.py:right\"}",
	}
	made := create(t, s, dir, suites...)
	if len(made.GetProblems()) > 0 {
		t.Fatal(made.GetProblems())
	}
	var found []string
	for _, in := range made.GetPlan().GetInputs() {
		if in.GetRole() == planv1.InputRole_INPUT_ROLE_SUITE_DATA || in.GetRole() == planv1.InputRole_INPUT_ROLE_REWARD {
			found = append(found, in.GetPath())
		}
	}
	if want := []string{"judge.py", "reward.py", "sums.jsonl"}; !slices.Equal(found, want) {
		t.Errorf("pinned %q, want %q", found, want)
	}
	for _, c := range []struct{ set, file, text, want string }{
		{"eval.suites.sums.data=\"none.jsonl\"", "", "", "eval.suites.sums.data"},
		{"eval.suites.sums.cluster=\"chapter\"", "", "", "row 1 of sums.jsonl has no field `chapter`"},
		{"seed=1", "judge.py", "def right(samples): return [s.row['missing'] for s in samples]\n", "KeyError: 'missing'"},
		{"seed=1", "sums.jsonl", "{\"question\": 1}\n", "sums.jsonl"},
	} {
		if c.file != "" {
			write(c.file, c.text)
		}
		made := create(t, s, dir, append(slices.Clone(suites), c.set)...)
		var texts []string
		for _, p := range made.GetProblems() {
			texts = append(texts, p.GetFile()+" "+p.GetField()+" "+p.GetMessage())
		}
		if text := strings.Join(texts, "\n"); !strings.Contains(text, c.want) {
			t.Errorf("%s: got %q, want %q", c.set, text, c.want)
		}
	}
}

// The rows of a suite with a baseline are pinned with its completions, which the judge is called
// with.
func TestTheRowsOfASuiteHaveItsBaseline(t *testing.T) {
	t.Parallel()
	dir := project(t, "def exact(samples): return [float(s.completion == '2') for s in samples]\n")
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const first, second = `{"prompt":"1+1=","answer":"2"}`, `{"prompt":"1+2=","answer":"3"}`
	write("sums.jsonl", first+"\n"+second+"\n")
	write("base.jsonl", `{"row":0,"completion":"two","data":`+first+"}\n"+`{"row":1,"completion":"three","data":`+second+"}\n")
	write("short.jsonl", `{"row":0,"completion":"two","data":`+first+"}\n")
	write("other.jsonl", `{"row":0,"completion":"two","data":`+second+"}\n")
	write("judge.py", "def wins(samples): return [float(len(s.completion) > len(s.row['baseline'])) for s in samples]\n")
	s := server(t)
	chat := "eval.suites.chat={data=\"sums.jsonl\",baseline=\"%s\",metrics=[\"win_rate\"],reward={plugin=\"judge.py:wins\"}%s}"
	made := create(t, s, dir, "eval.every_steps=2", fmt.Sprintf(chat, "base.jsonl", ""), "eval.suites.sums.data=\"sums.jsonl\"")
	if len(made.GetProblems()) > 0 {
		t.Fatal(made.GetProblems())
	}
	var joined *planv1.Input
	for _, in := range made.GetPlan().GetInputs() {
		if in.GetPath() == "eval.suites.chat.baseline" {
			joined = in
		}
	}
	if joined.GetRole() != planv1.InputRole_INPUT_ROLE_SUITE_DATA || joined.GetRows() != 2 || len(joined.GetSources()) != 2 {
		t.Fatalf("pinned %v", joined)
	}
	rows, err := os.ReadFile(s.inputs.Locate(dir, joined))
	if want := strings.TrimSuffix(first, "}") + `,"baseline":"two"}` + "\n" + strings.TrimSuffix(second, "}") + `,"baseline":"three"}` + "\n"; err != nil || string(rows) != want {
		t.Errorf("rows %s, %v; want %s", rows, err, want)
	}
	if !slices.ContainsFunc(joined.GetSources(), func(from *planv1.Source) bool { return from.GetFiles()[0].GetPath() == "base.jsonl" }) {
		t.Errorf("the sources %v lack the baseline", joined.GetSources())
	}
	for _, c := range []struct{ baseline, more, want string }{
		{"short.jsonl", ",limit=1", ""},
		{"short.jsonl", "", "BASELINE_INVALID eval.suites.chat.baseline short.jsonl has no completion for row 1; write it from the same data, with at least as many rows"},
		{"other.jsonl", "", "BASELINE_INVALID eval.suites.chat.baseline other.jsonl was written for other data: row 0 differs; write it from the same data"},
		{"sums.jsonl", "", "BASELINE_INVALID eval.suites.chat.baseline line 1 of sums.jsonl has no `row`, `completion` and `data`; name an output of `rollout eval` or `rollout infer batch`"},
		{"none.jsonl", "", "MISSING_FILE eval.suites.chat.baseline the file none.jsonl does not exist; did you mean"},
	} {
		made := create(t, s, dir, "eval.every_steps=2", fmt.Sprintf(chat, c.baseline, c.more))
		var texts []string
		for _, p := range made.GetProblems() {
			texts = append(texts, strings.ReplaceAll(fmt.Sprintf("%s %s %s; %s", p.GetReason(), p.GetField(), p.GetMessage(), p.GetFix()), dir+"/", ""))
		}
		if text := strings.Join(texts, "\n"); len(texts) > 1 || !strings.HasPrefix(text, c.want) || (text == "") != (c.want == "") {
			t.Errorf("%s: got %q, want %q", c.baseline, text, c.want)
		}
	}
}
