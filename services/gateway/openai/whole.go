package openai

import (
	"encoding/json"
	"math"
	"reflect"
	"strconv"
)

// whole is an integer. Clients whose numbers are all floats write 3 as 3.0, which is the same number.
type whole int64

// UnmarshalJSON implements json.Unmarshaler.
func (n *whole) UnmarshalJSON(raw []byte) error {
	text := string(raw)
	if text == "null" {
		return nil
	}
	if exact, err := strconv.ParseInt(text, 10, 64); err == nil {
		*n = whole(exact)
		return nil
	}
	const most = 1 << 53 // beyond it a float stands for several integers
	f, err := strconv.ParseFloat(text, 64)
	if err == nil && f == math.Trunc(f) && math.Abs(f) <= most {
		*n = whole(f)
		return nil
	}
	what := "number " + text
	if err != nil {
		what = map[byte]string{'"': "string", '{': "object", '[': "array", 't': "bool", 'f': "bool"}[text[0]]
	}
	return &json.UnmarshalTypeError{Value: what, Type: reflect.TypeFor[int64]()}
}
