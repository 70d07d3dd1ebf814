package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// place says in which line and column a body stops being JSON.
func place(raw []byte, syntax *json.SyntaxError) string {
	upTo := raw[:min(int(syntax.Offset), len(raw))]
	line := 1 + bytes.Count(upTo, []byte("\n"))
	column := len(upTo) - (bytes.LastIndexByte(upTo, '\n') + 1)
	return fmt.Sprintf("%s (line %d, column %d)", syntax, line, column)
}

// kindOf names a Go type as a JSON person does.
func kindOf(goType string) string {
	switch t := strings.TrimLeft(goType, "*"); {
	case strings.HasPrefix(t, "int"), strings.HasPrefix(t, "uint"):
		return "an integer"
	case strings.HasPrefix(t, "float"):
		return "a number"
	case t == "bool":
		return "a boolean"
	case t == "string":
		return "a string"
	case strings.HasPrefix(t, "[]"):
		return "a list"
	}
	return "an object"
}
