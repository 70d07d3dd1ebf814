package input

import (
	"bytes"
	"encoding/json"
)

// keys counts the keys at the top level of a JSON object, duplicates included.
func keys(line []byte) (n int) {
	depth, quoted := 0, false
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			depth++
		case c == '}' || c == ']':
			depth--
		case c == ':' && depth == 1:
			n++
		}
	}
	return n
}

// duplicate is the first duplicate key at the top level of a JSON object, and the byte offset of
// the second one; "" without duplicates.
func duplicate(line []byte) (key string, at int) {
	decoder := json.NewDecoder(bytes.NewReader(line))
	if _, err := decoder.Token(); err != nil { // the brace
		return "", 0
	}
	seen := map[string]bool{}
	for decoder.More() {
		before := int(decoder.InputOffset())
		name, err := decoder.Token()
		if err != nil {
			return "", 0
		}
		key, _ := name.(string)
		if seen[key] {
			return key, before + bytes.IndexByte(line[before:], '"')
		}
		seen[key] = true
		var value json.RawMessage
		if decoder.Decode(&value) != nil {
			return "", 0
		}
	}
	return "", 0
}
