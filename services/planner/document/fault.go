package document

import (
	"bytes"
	"strings"
	"unicode/utf8"
)

// describe turns a message of the syntax parser into one for users.
func describe(at Span, message string) Fault {
	word := wordAt(at)
	switch {
	case strings.Contains(message, "at start of value"), strings.HasPrefix(message, "expected keyword"),
		strings.HasPrefix(message, "strings must be quoted"):
		switch lower := strings.ToLower(word.Text()); {
		case word.Length == 0:
			return Fault{Span: at, Message: "the value is missing", Fix: "write a value after the `=`"}
		case lower == "true", lower == "false":
			return Fault{Span: word, Message: "`" + word.Text() + "` is not a value", Fix: "write `" + lower + "` in lower case"}
		case lower == "none", lower == "null":
			return Fault{Span: word, Message: "`" + word.Text() + "` is not a value", Fix: "remove the line: an absent key takes its default"}
		}
		return Fault{Span: word, Message: "`" + word.Text() + "` is not a value", Fix: `put text in quotes: "` + word.Text() + `"`}
	case message == "expected value, not end of input":
		return Fault{Span: at, Message: "the value is missing", Fix: "write a value after the `=`"}
	case strings.HasPrefix(message, "expected '=' after key"):
		return Fault{Span: at, Message: "the key has no `=`", Fix: "write `key = value`, or `[table]`"}
	case strings.HasPrefix(message, "basic strings cannot have new lines"), strings.HasPrefix(message, "literal strings cannot have new lines"),
		strings.HasPrefix(message, "unterminated"):
		return Fault{Span: lineOf(at), Message: "the text is not closed", Fix: "end it with the opening quote, on the same line"}
	case strings.HasPrefix(message, "array is incomplete"), strings.HasPrefix(message, "expected ',' or ']' after array value"):
		return Fault{Span: word, Message: "the list is not closed or lacks a comma", Fix: "separate its items by commas and close it with `]`"}
	case strings.HasPrefix(message, "expected ']'"):
		return Fault{Span: at, Message: "the table's name is not closed", Fix: "write `[name]`"}
	case strings.HasPrefix(message, "expected newline"):
		return Fault{Span: word, Message: "there is text after the value", Fix: "write one `key = value` per line; comments start with `#`"}
	case strings.HasPrefix(message, "integers cannot have leading zeroes"):
		return Fault{Span: word, Message: "an integer must not have leading zeroes", Fix: "remove them"}
	}
	return Fault{Span: at, Message: message, Fix: "see https://toml.io for the syntax"}
}

// wordAt is the word around a place.
func wordAt(at Span) Span {
	data := at.Source.Data
	inWord := func(i int) bool {
		return i >= 0 && i < len(data) && bytes.IndexByte([]byte(" \t\r\n=#,[]{}"), data[i]) < 0
	}
	start := at.Offset
	for inWord(start - 1) {
		start--
	}
	end := at.Offset
	for inWord(end) {
		end++
	}
	for end < len(data) && !utf8.RuneStart(data[end]) {
		end++
	}
	if end == start && end < len(data) && data[end] != '\n' {
		end++
	}
	return Span{at.Source, start, end - start}
}

// lineOf is the rest of the line from the value on.
func lineOf(at Span) Span {
	data := at.Source.Data
	start := bytes.LastIndexByte(data[:at.Offset], '\n') + 1
	line, _, _ := bytes.Cut(data[start:], []byte("\n"))
	if eq := bytes.IndexByte(line, '='); eq >= 0 {
		trimmed := bytes.TrimLeft(line[eq+1:], " \t")
		return Span{at.Source, start + len(line) - len(trimmed), len(bytes.TrimRight(trimmed, "\r"))}
	}
	return Span{at.Source, start, len(bytes.TrimRight(line, "\r"))}
}
