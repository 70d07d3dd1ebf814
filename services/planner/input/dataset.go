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
	"unicode/utf8"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// Dataset has the requirements of a JSON Lines file, and the result of reading it.
type Dataset struct {
	Path        string // its name in messages
	PromptField string
	AnswerField string // "" without required answers
	Preference  Preference
	// ReferenceField is the optional field of the reference answer.
	ReferenceField string
	ChatTemplate   bool // whether a prompt may be a list of messages
	Asked          bool // the policy answers the prompts, so messages must not end with an answer

	Rows      uint64
	Digest    string
	Bytes     uint64
	Desirable uint64 // rows whose label is true
	First     []Row  // the first rows, for the reward's dry call

	foreign  bool // the file is not JSON Lines
	problems *problem.List
	shown    map[string]int    // reported problems by kind
	hidden   map[string]uint64 // other problems by kind, counted only
}

// Row is one parsed row.
type Row struct {
	Prompt string
	Answer string
	JSON   json.RawMessage
}

const (
	firstRows  = 2       // rows kept for the dry call
	sameShown  = 5       // problems of one kind that are reported individually
	maxRow     = 8 << 20 // bytes of a row; JetStream and gRPC carry no larger message
	maxExcerpt = 4096    // bytes of a row shown with a problem
)

// Read reads the file once, parses every row, and computes the digest. It adds problems; the error
// is that of the file system.
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
	blanks := 0
	for {
		line, err = readLine(reader, line[:0], hasher)
		d.Bytes += uint64(len(line))
		switch {
		case len(line) == 0 || d.foreign:
		case len(bytes.TrimSpace(line)) == 0:
			blanks++ // ignored at the end of the file
		default:
			for ; blanks > 0; blanks-- {
				d.Rows++
				d.row(nil)
			}
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

// Reference is the reference answer of a row; "" without one that is a string.
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

func (d *Dataset) row(line []byte) {
	switch {
	case len(line) > maxRow:
		d.bad("large", line, -1, "", fmt.Sprintf("the row has %d bytes; the limit is %d", len(line), maxRow), "shorten it, or store the content in a file and put its path into the row")
		return
	case len(bytes.TrimSpace(line)) == 0:
		d.bad("blank", line, -1, "", "the line is empty", "remove it: each line is one row")
		return
	case d.Rows == 1 && bytes.HasPrefix(line, []byte("version https://git-lfs")):
		d.foreign = true
		d.bad("lfs", line, -1, "", "the file is a pointer of Git LFS, not the data", "run `git lfs pull`")
		return
	case d.Rows == 1 && utf16(line) != "":
		d.foreign = true
		d.report(nil, -1, "", "the file is "+utf16(line)+", not UTF-8: `>` of PowerShell 5 writes that",
			fmt.Sprintf("save it as UTF-8, or convert it: iconv -f %s -t UTF-8 %s > utf8.jsonl", utf16(line), d.Path))
		return
	case d.Rows == 1 && bytes.HasPrefix(line, []byte(byteOrderMark)):
		d.bad("bom", line, 0, "", "the file begins with a byte order mark (BOM), which is not JSON",
			fmt.Sprintf(`save it as "UTF-8 without BOM", or remove the mark: sed -i '1s/^\xef\xbb\xbf//' %s`, d.Path))
		return
	case !utf8.Valid(line):
		d.bad("utf8", line, invalidUTF8(line), "", "the row is not UTF-8", "save the file as UTF-8")
		return
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(line, &fields); err != nil {
		d.notJSON(line, err)
		return
	}
	if fields == nil {
		d.bad("object", line, 0, "", "the row is null, not an object", "write one object per line: {\"prompt\": \"...\"}")
		return
	}
	if keys(line) > len(fields) {
		key, at := duplicate(line)
		d.bad("duplicate", line, at, "", fmt.Sprintf("the row has %q twice: only the last one would be used", key), "remove one of the two")
		return
	}
	if !d.plain(line, fields) {
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
		fix := "write one JSON object per line"
		if d.Rows == 1 && line[0] == '[' {
			d.foreign = true
		}
		if line[0] == '[' || d.Rows == 1 && bytes.Equal(bytes.TrimSpace(line), []byte("{")) {
			fix = "the file must be JSON Lines: one object per line, without a list around them"
		} else if bytes.Contains(line, []byte("{'")) {
			fix = "JSON takes double quotes only: write the file with `json.dumps`"
		}
		d.bad("json", line, min(max(at, 0), len(line)), "", "the row is not JSON: "+syntax.Error(), fix)
	case errors.As(err, &kind):
		d.bad("object", line, 0, "", fmt.Sprintf("the row is %s, not an object", article(kind.Value)), "write one object per line: {\"prompt\": \"...\"}")
	default:
		d.bad("json", line, -1, "", "the row is not JSON: "+err.Error(), "write one JSON object per line")
	}
}
