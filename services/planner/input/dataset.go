package input

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/rollout-rl/rollout/libs/id"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// Dataset is what a JSON Lines file must be, and what was found.
type Dataset struct {
	Path        string // as messages name it
	PromptField string
	AnswerField string // "" where no answer is needed
	Preference  Preference
	// ReferenceField holds the reference answer where the row has one; nothing is asked of it.
	ReferenceField string
	ChatTemplate   bool // whether a prompt may be a list of messages
	Asked          bool // prompts are answered here: their messages may not end with the answer

	Rows      uint64
	Digest    string
	Bytes     uint64
	Desirable uint64 // rows whose label is true
	First     []Row  // the first rows, for the reward's dry call

	foreign  bool // it is another kind of file: its lines are no rows
	problems *problem.List
	shown    map[string]int    // problems of one kind named so far
	hidden   map[string]uint64 // further ones, counted
}

// Row is one parsed row.
type Row struct {
	Prompt string
	Answer string
	JSON   json.RawMessage
}

const (
	firstRows  = 2       // rows kept for the dry call
	sameShown  = 5       // problems of one kind that are named one by one
	maxRow     = 8 << 20 // bytes of a row; JetStream and gRPC carry no larger message
	maxExcerpt = 4096    // bytes of a row shown with a problem
)

// Read reads the whole file once: every row is parsed and the digest taken. What is wrong goes to problems; the error is that
// of the file system.
func (d *Dataset) Read(file string, problems *problem.List) error {
	d.problems, d.shown, d.hidden = problems, map[string]int{}, map[string]uint64{}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	hasher := id.NewHasher()
	reader := bufio.NewReaderSize(f, 1<<20)
	var line []byte
	for {
		line, err = readLine(reader, line[:0], hasher)
		d.Bytes += uint64(len(line))
		if len(line) > 0 && !d.foreign {
			d.Rows++
			d.row(bytes.TrimRight(line, "\r\n"))
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", file, err)
		}
	}
	d.Digest = hasher.ID()
	d.summary()
	return nil
}

// Reference is the reference answer of a row, "" where it has none that is a text.
func (d *Dataset) Reference(row Row) string {
	if row.Answer != "" {
		return row.Answer
	}
	var fields map[string]json.RawMessage
	var text string
	if json.Unmarshal(row.JSON, &fields) == nil {
		_ = json.Unmarshal(fields[d.ReferenceField], &text)
	}
	return text
}

func readLine(reader *bufio.Reader, line []byte, w io.Writer) ([]byte, error) {
	for {
		piece, err := reader.ReadSlice('\n')
		line = append(line, piece...)
		_, _ = w.Write(piece)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

func (d *Dataset) row(line []byte) {
	switch {
	case len(line) > maxRow:
		d.bad("large", line, -1, "", fmt.Sprintf("the row has %d bytes; at most %d can travel", len(line), maxRow), "shorten it, or name a file in it")
		return
	case len(bytes.TrimSpace(line)) == 0:
		d.bad("blank", line, -1, "", "the line is empty", "remove it: every line is one row")
		return
	case d.Rows == 1 && bytes.HasPrefix(line, []byte("version https://git-lfs")):
		d.foreign = true
		d.bad("lfs", line, -1, "", "the file is a pointer of Git LFS, not the data", "run `git lfs pull`")
		return
	case d.Rows == 1 && bytes.HasPrefix(line, []byte(byteOrderMark)):
		d.bad("bom", line, 0, "", "the file begins with a byte order mark (BOM), which is no JSON",
			fmt.Sprintf(`save it as "UTF-8 without BOM", or remove the mark: sed -i '1s/^\xef\xbb\xbf//' %s`, d.Path))
		return
	case !utf8.Valid(line):
		d.bad("utf8", line, invalidUTF8(line), "", "the row is no UTF-8 text", "save the file as UTF-8")
		return
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(line, &fields); err != nil {
		d.notJSON(line, err)
		return
	}
	if fields == nil {
		d.bad("object", line, 0, "", "the row is null, not an object", "write one object a line: {\"prompt\": \"...\"}")
		return
	}
	if keys(line) > len(fields) {
		key, at := duplicate(line)
		d.bad("duplicate", line, at, "", fmt.Sprintf("the row has %q twice: the last one would count", key), "remove one of the two")
		return
	}
	prompt, ok := d.prompt(line, fields)
	answer, answerOK := d.answer(line, fields)
	d.preference(line, fields)
	if ok && answerOK && len(d.First) < firstRows {
		d.First = append(d.First, Row{Prompt: prompt, Answer: answer, JSON: slices.Clone(line)})
	}
}

func (d *Dataset) notJSON(line []byte, err error) {
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		at := int(syntax.Offset) - 1
		mend := "write one JSON object a line"
		if d.Rows == 1 && line[0] == '[' {
			d.foreign = true
		}
		if line[0] == '[' || d.Rows == 1 && bytes.Equal(bytes.TrimSpace(line), []byte("{")) {
			mend = "the file must be JSON Lines: one object a line, no list around them"
		} else if bytes.Contains(line, []byte("{'")) {
			mend = "JSON takes double quotes only: write the file with `json.dumps`"
		}
		d.bad("json", line, min(max(at, 0), len(line)), "", "the row is no JSON: "+syntax.Error(), mend)
	case errors.As(err, &kind):
		d.bad("object", line, 0, "", fmt.Sprintf("the row is %s, not an object", article(kind.Value)), "write one object a line: {\"prompt\": \"...\"}")
	default:
		d.bad("json", line, -1, "", "the row is no JSON: "+err.Error(), "write one JSON object a line")
	}
}

func (d *Dataset) prompt(line []byte, fields map[string]json.RawMessage) (string, bool) {
	raw, ok := fields[d.PromptField]
	if !ok {
		d.lacks(line, fields, d.PromptField, "data.prompt_field", "prompt_field")
		return "", false
	}
	var text string
	if json.Unmarshal(raw, &text) == nil && raw[0] == '"' {
		if text == "" {
			d.badField("empty prompt", line, d.PromptField, fmt.Sprintf("`%s` is empty", d.PromptField), "remove the row, or write a prompt")
		}
		return text, text != ""
	}
	var messages []map[string]json.RawMessage
	if json.Unmarshal(raw, &messages) != nil || raw[0] != '[' {
		d.badField("prompt type", line, d.PromptField, fmt.Sprintf("`%s` is %s, neither a text nor a list of messages", d.PromptField, jsonKind(raw)),
			"write a text, or a list of {\"role\": ..., \"content\": ...}")
		return "", false
	}
	if !d.ChatTemplate {
		d.badField("messages", line, d.PromptField, fmt.Sprintf("`%s` is a list of messages, which needs a chat template", d.PromptField),
			"set `chat_template = true` in [model]")
		return "", false
	}
	return d.messages(line, messages)
}

func (d *Dataset) messages(line []byte, messages []map[string]json.RawMessage) (string, bool) {
	if len(messages) == 0 {
		d.badField("empty prompt", line, d.PromptField, fmt.Sprintf("`%s` holds no message", d.PromptField), "remove the row, or write a message")
		return "", false
	}
	last := map[string]string{}
	for i, message := range messages {
		for _, key := range []string{"role", "content"} {
			var text string
			if raw, ok := message[key]; !ok || json.Unmarshal(raw, &text) != nil || raw[0] != '"' {
				d.badField("message", line, d.PromptField, fmt.Sprintf("message %d of `%s` has no text `%s`", i, d.PromptField, key),
					"write {\"role\": \"user\", \"content\": \"...\"}")
				return "", false
			}
			last[key] = text
		}
	}
	if d.Asked && last["role"] == assistant {
		d.badField("answered", line, d.PromptField, fmt.Sprintf("`%s` ends with the assistant's message, and the policy is to answer it", d.PromptField),
			"end it with the user's; a reward finds the right answer in another field")
		return "", false
	}
	return last["content"], true
}

// byteOrderMark is what editors on Windows put before a text.
const byteOrderMark = "\xef\xbb\xbf"

const assistant = "assistant"

// conversation reports whether the prompt is messages that end with the assistant's, so that the row needs no answer beside them.
func (d *Dataset) conversation(fields map[string]json.RawMessage) bool {
	var messages []struct{ Role string }
	return json.Unmarshal(fields[d.PromptField], &messages) == nil && len(messages) > 0 && messages[len(messages)-1].Role == assistant
}

// Completions are the fields that are trained on after the prompt, by name.
func (d *Dataset) Completions() []string {
	if d.AnswerField != "" {
		return []string{d.AnswerField}
	}
	return d.Preference.completions()
}

func (d *Dataset) answer(line []byte, fields map[string]json.RawMessage) (string, bool) {
	field := d.AnswerField
	if field == "" {
		return "", true
	}
	raw, ok := fields[field]
	if !ok && d.conversation(fields) {
		return "", true
	}
	if !ok {
		d.lacks(line, fields, field, "data.answer_field", "answer_field")
		return "", false
	}
	var text string
	if json.Unmarshal(raw, &text) != nil || raw[0] != '"' || text == "" {
		what := jsonKind(raw) + ", not a text"
		if text == "" && raw[0] == '"' {
			what = empty
		}
		d.badField("answer type", line, field, fmt.Sprintf("`%s` is %s; [algorithm.sft] trains on it", field, what), mendText("answer", what))
		return "", false
	}
	return text, true
}

// mendText says how to mend what should be a text that is trained on.
func mendText(noun, what string) string {
	if what == empty {
		return "remove the row, or write the " + noun + ": nothing is learned from none"
	}
	return "write the " + noun + " as a text in quotes"
}

const empty = "empty"

// lacks reports an absent field, with the fields that are there.
func (d *Dataset) lacks(line []byte, fields map[string]json.RawMessage, field, path, key string) {
	names := make([]string, 0, len(fields))
	for name := range fields {
		names = append(names, name)
	}
	slices.Sort(names)
	mend := fmt.Sprintf("add it, or set `%s` in [data]", key)
	if len(names) > 0 {
		mend += "; the row has `" + strings.Join(names, "`, `") + "`"
	}
	d.bad("lacks "+field, line, -1, path, fmt.Sprintf("the row has no `%s`", field), mend)
}

func (d *Dataset) badField(kind string, line []byte, field, message, mend string) {
	key, _ := json.Marshal(field)
	d.bad(kind, line, bytes.Index(line, key), "", message, mend)
}

// bad reports a problem of the current row; at is the byte that it begins at, -1 for the whole row.
func (d *Dataset) bad(kind string, line []byte, at int, field, message, mend string) {
	if d.shown[kind] >= sameShown {
		d.hidden[kind]++
		return
	}
	d.shown[kind]++
	p := &planv1.Problem{Reason: problem.BadRow, File: d.Path, Line: uint32(d.Rows), Column: 1, Message: message, Mend: mend, Field: field}
	if at >= 0 && at <= len(line) {
		p.Column = uint32(utf8.RuneCount(line[:at]) + 1)
		p.Text = strings.ToValidUTF8(wordAt(line, at), "\uFFFD")
	}
	p.Excerpt = strings.ToValidUTF8(string(line[:min(len(line), maxExcerpt)]), "\uFFFD")
	d.problems.Add(p)
}

// summary counts what was not named one by one, and says where a file is empty.
func (d *Dataset) summary() {
	if d.Rows == 0 {
		d.problems.Add(&planv1.Problem{
			Reason: problem.BadRow, File: d.Path, Message: "the file is empty", Mend: "write one JSON object a line, such as {\"prompt\": \"17+25=\", \"answer\": \"42\"}",
		})
	}
	kinds := make([]string, 0, len(d.hidden))
	for kind := range d.hidden {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	total := uint64(0)
	for _, kind := range kinds {
		total += d.hidden[kind]
	}
	if total > 0 {
		d.problems.Add(&planv1.Problem{
			Reason: problem.BadRow, File: d.Path, Line: uint32(d.Rows),
			Message: fmt.Sprintf("and %d more problems of the same kinds", total), Mend: "correct those above first",
		})
	}
}

// Lines returns the given lines of a file, from 1 and ascending, as far as they are shown with a problem.
func Lines(file string, wanted []uint64) map[uint64]string {
	out := map[uint64]string{}
	f, err := os.Open(file)
	if err != nil {
		return out // a problem without its line is still a problem
	}
	defer f.Close()
	reader := bufio.NewReaderSize(f, 1<<20)
	var line []byte
	for n := uint64(1); len(wanted) > 0; n++ {
		line, err = readLine(reader, line[:0], io.Discard)
		if n == wanted[0] {
			text := bytes.TrimRight(line, "\r\n")
			out[n], wanted = strings.ToValidUTF8(string(text[:min(len(text), maxExcerpt)]), "\uFFFD"), wanted[1:]
		}
		if err != nil {
			break
		}
	}
	return out
}

// wordAt is the JSON token that begins at a byte, as far as it is of use in a message.
func wordAt(line []byte, at int) string {
	rest := line[at:]
	if len(rest) > 0 && rest[0] == '"' {
		if end := bytes.IndexByte(rest[1:], '"'); end >= 0 {
			return string(rest[:end+2])
		}
	}
	_, size := utf8.DecodeRune(rest)
	return string(rest[:size])
}

func invalidUTF8(line []byte) int {
	for i := 0; i < len(line); {
		r, size := utf8.DecodeRune(line[i:])
		if r == utf8.RuneError && size == 1 {
			return i
		}
		i += size
	}
	return 0
}

func jsonKind(raw json.RawMessage) string {
	switch raw[0] {
	case '"':
		return "a text"
	case '{':
		return "an object"
	case '[':
		return "a list"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	}
	return "a number"
}

func article(kind string) string {
	switch kind {
	case "array":
		return "a list"
	case "bool":
		return "a boolean"
	}
	return "a " + kind
}
