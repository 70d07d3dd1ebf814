package input

import (
	"bytes"
	"encoding/json"
	"hash/maphash"
)

// duplicates finds equal rows by a hash of 64 bits.
type duplicates struct {
	first               map[uint64]uint64 // row by hash
	count, row, earlier uint64
}

func (d *duplicates) add(row uint64, identity []byte) {
	hash := maphash.Bytes(seed, identity)
	earlier, known := d.first[hash]
	if !known {
		d.first[hash] = row
		return
	}
	if d.count++; d.count == 1 {
		d.row, d.earlier = row, earlier
	}
}

var seed = maphash.MakeSeed()

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
