package input

import (
	"bufio"
	"encoding/csv"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// inCSV is the place of a row, from 1, in a CSV or TSV file: the line on which the value of a
// column starts, that of the row without a column, and the text of the line. A file that has
// changed or can't be read gives the number of the row.
func inCSV(file string, row uint64, column string) (line, at uint32, excerpt string) {
	f, err := os.Open(file)
	if err != nil {
		return uint32(row), 1, ""
	}
	defer f.Close()
	text := bufio.NewReader(f)
	if mark, _ := text.Peek(len(byteOrderMark)); string(mark) == byteOrderMark {
		_, _ = text.Discard(len(byteOrderMark))
	}
	reader := csv.NewReader(text)
	reader.FieldsPerRecord, reader.LazyQuotes = -1, true
	if filepath.Ext(file) == ".tsv" {
		reader.Comma = '\t'
	}
	header, err := reader.Read()
	var values []string
	for n := uint64(0); n < row && err == nil; n++ {
		values, err = reader.Read()
	}
	if err != nil {
		return uint32(row), 1, ""
	}
	found, start := reader.FieldPos(0)
	if i := slices.Index(header, column); i > 0 && i < len(values) {
		found, start = reader.FieldPos(i)
	}
	return uint32(found), uint32(start), strings.TrimPrefix(Lines(file, []uint64{uint64(found)})[uint64(found)], byteOrderMark)
}
