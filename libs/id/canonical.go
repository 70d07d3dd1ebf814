package id

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// CanonicalJSON is the ProtoJSON of m, with proto field names and without unset fields, in the form
// of RFC 8785: keys sorted by UTF-16 code units, no white space, numbers as ECMAScript prints them.
// (protojson alone varies its spacing on purpose, and deterministic binary promises nothing between
// versions and languages.)
func CanonicalJSON(m proto.Message) ([]byte, error) {
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("canonical json of %s: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	return Canonicalize(raw)
}

// Canonicalize rewrites one JSON document in the form of RFC 8785.
func Canonicalize(raw []byte) ([]byte, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, fmt.Errorf("canonicalize json: %w", err)
	}
	if dec.More() {
		return nil, fmt.Errorf("canonicalize json: more than one document")
	}
	return appendValue(nil, v)
}

func appendValue(b []byte, v any) ([]byte, error) {
	switch v := v.(type) {
	case nil:
		return append(b, "null"...), nil
	case bool:
		return strconv.AppendBool(b, v), nil
	case string:
		return appendString(b, v), nil
	case json.Number:
		return appendNumber(b, v)
	case []any:
		return appendArray(b, v)
	case map[string]any:
		return appendObject(b, v)
	}
	return nil, fmt.Errorf("canonicalize json: unexpected %T", v)
}

func appendArray(b []byte, items []any) ([]byte, error) {
	b = append(b, '[')
	for i, item := range items {
		if i > 0 {
			b = append(b, ',')
		}
		var err error
		if b, err = appendValue(b, item); err != nil {
			return nil, err
		}
	}
	return append(b, ']'), nil
}

func appendObject(b []byte, object map[string]any) ([]byte, error) {
	keys := make([]string, 0, len(object))
	for k := range object {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(x, y string) int {
		return slices.Compare(utf16.Encode([]rune(x)), utf16.Encode([]rune(y)))
	})
	b = append(b, '{')
	for i, k := range keys {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendString(b, k), ':')
		var err error
		if b, err = appendValue(b, object[k]); err != nil {
			return nil, err
		}
	}
	return append(b, '}'), nil
}

// appendString escapes what RFC 8785 escapes and nothing more.
func appendString(b []byte, s string) []byte {
	const short = "\b\t\n\f\r\"\\"
	const escape = `btnfr"\`
	b = append(b, '"')
	for _, r := range s {
		switch i := strings.IndexRune(short, r); {
		case i >= 0:
			b = append(b, '\\', escape[i])
		case r < 0x20:
			b = fmt.Appendf(b, `\u%04x`, r)
		default:
			b = append(b, string(r)...)
		}
	}
	return append(b, '"')
}

// appendNumber prints an IEEE 754 double as ECMAScript's Number::toString does.
func appendNumber(b []byte, n json.Number) ([]byte, error) {
	f, err := n.Float64()
	if err != nil || math.IsInf(f, 0) {
		return nil, fmt.Errorf("canonicalize json: number %q is not a double", n)
	}
	if f == 0 {
		return append(b, '0'), nil
	}
	if abs := math.Abs(f); abs >= 1e-6 && abs < 1e21 {
		return strconv.AppendFloat(b, f, 'f', -1, 64), nil
	}
	s := strconv.FormatFloat(f, 'e', -1, 64)
	mantissa, exponent, _ := strings.Cut(s, "e")
	sign, digits := exponent[:1], strings.TrimLeft(exponent[1:], "0")
	return append(b, mantissa+"e"+sign+digits...), nil
}
