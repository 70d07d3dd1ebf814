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
	File        string
	Path        string // what messages call it
	PromptField string // "" without required prompts
	AnswerField string // "" without required answers
	Preference  Preference
	// ReferenceField is the optional field of the reference answer.
	ReferenceField string
	ChatTemplate   bool // whether a prompt may be a list of messages
	Asked          bool // the policy answers the prompts, so messages must not end with an answer
	Repeats        bool // rows are repeated on purpose
	// Table is the CSV or TSV file that the rows were made from; "" for other rows. Problems are
	// placed in it.
	Table string

	Rows      uint64
	Digest    string
	Bytes     uint64
	Desirable uint64 // rows whose label is true
	Ties, Tie uint64 // pairs of equal completions, and the first one, from 1
	First     []Row  // the first rows, for the reward's dry call

	duplicates duplicates
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

// Read reads the file once, parses every row, and computes the digest. It adds problems. The error
// is that of the file system.
func (d *Dataset) Read(problems *problem.List) error {
	f, err := os.Open(d.File)
	if err != nil {
		return err
	}
	defer f.Close()
	check := newRowCheck(d, problems)
	hasher := id.NewHasher()
	reader := bufio.NewReaderSize(f, 1<<20)
	var line []byte
	blanks := 0
	for {
		line, err = readLine(reader, line[:0], hasher)
		d.Bytes += uint64(len(line))
		switch {
		case len(line) == 0 || check.foreign:
		case len(bytes.TrimSpace(line)) == 0:
			blanks++ // ignored at the end of the file
		default:
			for ; blanks > 0; blanks-- {
				check.row(nil)
			}
			check.row(bytes.TrimRight(line, "\r\n"))
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", d.File, err)
		}
	}
	d.Digest, d.Rows, d.Desirable = hasher.ID(), check.number, check.preference.desirable
	d.Ties, d.Tie = check.preference.ties, check.preference.tie
	check.summary()
	return nil
}

// Duplicates is the number of rows whose prompt an earlier row has, or if rows are trained on, that
// are equal to an earlier row; and the first such row and that earlier one, from 1.
func (d *Dataset) Duplicates() (count, row, earlier uint64) {
	return d.duplicates.count, d.duplicates.row, d.duplicates.earlier
}

// Shared is the number of distinct rows that another dataset has too, by their prompt or, if rows
// are trained on, as a whole; and the first of them, from 1.
func (d *Dataset) Shared(other *Dataset) (count, row uint64) {
	for hash, at := range d.duplicates.first {
		if _, known := other.duplicates.first[hash]; !known {
			continue
		}
		if count++; row == 0 || at < row {
			row = at
		}
	}
	return count, row
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

// rowCheck checks the rows of a dataset, one after another.
type rowCheck struct {
	*reporter
	data       *Dataset
	preference preferenceCheck
	foreign    bool // the file is not JSON Lines
}

func newRowCheck(d *Dataset, problems *problem.List) *rowCheck {
	r := &reporter{path: d.Path, table: d.Table, problems: problems, shown: map[string]int{}, hidden: map[string]uint64{}}
	d.duplicates.first = map[uint64]uint64{}
	return &rowCheck{reporter: r, data: d, preference: preferenceCheck{reporter: r, Preference: d.Preference}}
}

// identity is what makes a row a duplicate: its prompt, or all of it if it is trained on or has no
// prompt.
func (c *rowCheck) identity(line []byte, fields map[string]json.RawMessage) []byte {
	if len(c.data.Completions()) > 0 || c.data.PromptField == "" {
		return line
	}
	return fields[c.data.PromptField]
}

// row checks the next row; nil for a blank line.
func (c *rowCheck) row(line []byte) {
	c.number++
	switch {
	case len(line) > maxRow:
		c.bad("large", line, -1, "", fmt.Sprintf("the row has %d bytes; the limit is %d", len(line), maxRow), "shorten it, or store the content in a file and put its path into the row")
		return
	case len(bytes.TrimSpace(line)) == 0:
		c.bad("blank", line, -1, "", "the line is empty", "remove it: each line is one row")
		return
	case c.number == 1 && bytes.HasPrefix(line, []byte("version https://git-lfs")):
		c.foreign = true
		c.bad("lfs", line, -1, "", "the file is a pointer of Git LFS, not the data", "run `git lfs pull`")
		return
	case c.number == 1 && utf16(line) != "":
		c.foreign = true
		c.report(nil, -1, "", "the file is "+utf16(line)+", not UTF-8: `>` of PowerShell 5 writes that",
			fmt.Sprintf("save it as UTF-8, or convert it: iconv -f %s -t UTF-8 %s > utf8.jsonl", utf16(line), c.path))
		return
	case c.number == 1 && bytes.HasPrefix(line, []byte(byteOrderMark)):
		c.bad("bom", line, 0, "", "the file begins with a byte order mark (BOM), which is not JSON",
			fmt.Sprintf(`save it as "UTF-8 without BOM", or remove the mark: sed -i '1s/^\xef\xbb\xbf//' %s`, c.path))
		return
	case !utf8.Valid(line):
		c.bad("utf8", line, invalidUTF8(line), "", "the row is not UTF-8", "save the file as UTF-8")
		return
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(line, &fields); err != nil {
		c.notJSON(line, err)
		return
	}
	if fields == nil {
		c.bad("object", line, 0, "", "the row is null, not an object", "write one object per line: {\"prompt\": \"...\"}")
		return
	}
	if keys(line) > len(fields) {
		key, at := duplicate(line)
		c.bad("duplicate", line, at, "", fmt.Sprintf("the row has %q twice: only the last one would be used", key), "remove one of the two")
		return
	}
	if !c.plain(line, fields) {
		return
	}
	prompt, ok := c.prompt(line, fields)
	answer, answerOK := c.answer(line, fields)
	c.preference.row(line, fields)
	if ok {
		c.data.duplicates.add(c.number, c.identity(line, fields))
	}
	if ok && answerOK && len(c.data.First) < firstRows {
		c.data.First = append(c.data.First, Row{Prompt: prompt, Answer: answer, JSON: slices.Clone(line)})
	}
}

func (c *rowCheck) notJSON(line []byte, err error) {
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		at := int(syntax.Offset) - 1
		fix := "write one JSON object per line"
		if c.number == 1 && line[0] == '[' {
			c.foreign = true
		}
		if line[0] == '[' || c.number == 1 && bytes.Equal(bytes.TrimSpace(line), []byte("{")) {
			fix = "the file must be JSON Lines: one object per line, without a list around them"
		} else if bytes.Contains(line, []byte("{'")) {
			fix = "JSON takes double quotes only: write the file with `json.dumps`"
		}
		c.bad("json", line, min(max(at, 0), len(line)), "", "the row is not JSON: "+syntax.Error(), fix)
	case errors.As(err, &kind):
		c.bad("object", line, 0, "", fmt.Sprintf("the row is %s, not an object", article(kind.Value)), "write one object per line: {\"prompt\": \"...\"}")
	default:
		c.bad("json", line, -1, "", "the row is not JSON: "+err.Error(), "write one JSON object per line")
	}
}
