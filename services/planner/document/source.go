// Package document reads TOML into a tree with the place of every key and value.
//
// TOML decoders lose positions and stop at the first mistake. Users want all mistakes at once,
// each with line, column, and text, so the planner reads the syntax tree.
package document

import (
	"bytes"
	"fmt"
	"sort"
	"strings"
	"unicode/utf8"
)

// Source is one text: the configuration file, or an override given as `--set`.
type Source struct {
	Name      string
	Data      []byte
	FirstLine int // number of the first line; the n-th override is line n of the pseudo-file `--set`

	lines []int // offset of each line's first byte
}

// NewSource returns a source whose first line is firstLine.
func NewSource(name string, data []byte, firstLine int) *Source {
	s := &Source{Name: name, Data: data, FirstLine: firstLine, lines: []int{0}}
	for i, b := range data {
		if b == '\n' {
			s.lines = append(s.lines, i+1)
		}
	}
	return s
}

// invalid finds the first byte that is not UTF-8. Problems can only contain UTF-8, so from then on
// the source has the replacement character instead of each such byte.
func (s *Source) invalid() (Fault, bool) {
	if utf8.Valid(s.Data) {
		return Fault{}, false
	}
	at := 0
	for r, size := utf8.DecodeRune(s.Data); r != utf8.RuneError || size > 1; r, size = utf8.DecodeRune(s.Data[at:]) {
		at += size
	}
	wrong := s.Data[at]
	*s = *NewSource(s.Name, []byte(string([]rune(string(s.Data)))), s.FirstLine)
	return Fault{
		Span: Span{Source: s, Offset: at, Length: len("\uFFFD")}, Message: fmt.Sprintf("the byte 0x%02x is not UTF-8", wrong), Fix: "save the file as UTF-8",
	}, true
}

// End is the empty span after the last line with text.
func (s *Source) End() Span {
	return Span{Source: s, Offset: len(bytes.TrimRight(s.Data, " \t\r\n"))}
}

// Span is a piece of a source, in bytes.
type Span struct {
	Source *Source
	Offset int
	Length int
}

// Valid reports whether the span belongs to a source.
func (s Span) Valid() bool { return s.Source != nil }

// Text is the text of the span, up to the end of its first line.
func (s Span) Text() string {
	if !s.Valid() {
		return ""
	}
	text, _, _ := strings.Cut(string(s.Source.Data[s.Offset:s.Offset+s.Length]), "\n")
	return strings.TrimRight(text, "\r")
}

// Position is line and column of the first character, both from 1; columns count characters.
func (s Span) Position() (line, column int) {
	if !s.Valid() {
		return 0, 0
	}
	i := s.lineIndex()
	return i + s.Source.FirstLine, utf8.RuneCount(s.Source.Data[s.Source.lines[i]:s.Offset]) + 1
}

// Line is the whole line of the first character, without its end.
func (s Span) Line() string {
	if !s.Valid() {
		return ""
	}
	line, _, _ := bytes.Cut(s.Source.Data[s.Source.lines[s.lineIndex()]:], []byte("\n"))
	return strings.TrimRight(string(line), "\r")
}

func (s Span) lineIndex() int {
	return sort.SearchInts(s.Source.lines, s.Offset+1) - 1
}
