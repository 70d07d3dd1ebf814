package edge

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// Decode reads a JSON object. An error has the position, or the field with the wrong type.
func Decode(w http.ResponseWriter, r *http.Request, into any) error {
	raw, err := io.ReadAll(r.Body)
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return &Error{Status: http.StatusRequestEntityTooLarge, Code: "request_too_large", Message: "the request body is larger than 16 MiB"}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return &Error{Status: http.StatusRequestTimeout, Code: "request_timeout", Message: "the request body did not arrive in time", Fix: "send the whole body at once"}
	case err != nil:
		return &Error{Status: http.StatusBadRequest, Code: "invalid_body", Message: "the request body could not be read: " + err.Error()}
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // the response may take longer
	return Unmarshal(raw, into)
}

// Unmarshal is Decode of a body that was read.
func Unmarshal(raw []byte, into any) error {
	err := json.Unmarshal(raw, into)
	var known *Error
	var syntax *json.SyntaxError
	var wrong *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return known
	case errors.As(err, &syntax):
		return &Error{Status: http.StatusBadRequest, Code: "invalid_json", Message: "the body is not valid JSON: " + position(raw, syntax)}
	case errors.As(err, &wrong):
		if wrong.Field == "" {
			return &Error{Status: http.StatusBadRequest, Code: "invalid_json", Message: "the body must be a JSON object, got " + wrong.Value}
		}
		field := wrong.Field[strings.LastIndexByte(wrong.Field, '.')+1:]
		return &Error{
			Status: http.StatusBadRequest, Param: field, Code: "invalid_type",
			Message: "invalid type for `" + field + "`: expected " + jsonType(wrong.Type.String()) + ", got " + wrong.Value,
		}
	}
	return &Error{Status: http.StatusBadRequest, Code: "invalid_json", Message: err.Error()}
}

// position returns a syntax error with its line and column.
func position(raw []byte, syntax *json.SyntaxError) string {
	before := raw[:min(int(syntax.Offset), len(raw))]
	line := 1 + bytes.Count(before, []byte("\n"))
	column := len(before) - (bytes.LastIndexByte(before, '\n') + 1)
	return fmt.Sprintf("%s (line %d, column %d)", syntax, line, column)
}

// jsonType returns the JSON name of a Go type.
func jsonType(goType string) string {
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

// Integer is an integer that accepts 3.0 for 3, because some clients write all numbers as floats.
type Integer int64

// UnmarshalJSON implements json.Unmarshaler.
func (n *Integer) UnmarshalJSON(raw []byte) error {
	text := string(raw)
	if text == "null" {
		return nil
	}
	if exact, err := strconv.ParseInt(text, 10, 64); err == nil {
		*n = Integer(exact)
		return nil
	}
	const largest = 1 << 53 // above it, a float represents several integers
	f, err := strconv.ParseFloat(text, 64)
	if err == nil && f == math.Trunc(f) && math.Abs(f) <= largest {
		*n = Integer(f)
		return nil
	}
	what := "number " + text
	if err != nil {
		what = map[byte]string{'"': "string", '{': "object", '[': "array", 't': "bool", 'f': "bool"}[text[0]]
	}
	return &json.UnmarshalTypeError{Value: what, Type: reflect.TypeFor[int64]()}
}

// IsSet reports whether a value is present and is not a default.
func IsSet(value json.RawMessage) bool {
	return len(value) > 0 && !strings.Contains(" null false 0 [] {} \"\" ", " "+string(value)+" ")
}
