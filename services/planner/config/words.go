package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// tomlText writes a value of a field as TOML. Exponents have no leading zeros: 1e-6.
func tomlText(field protoreflect.FieldDescriptor, value protoreflect.Value) string {
	switch field.Kind() {
	case protoreflect.StringKind:
		return strconv.Quote(value.String())
	case protoreflect.DoubleKind:
		return Decimal(value.Float())
	}
	return value.String()
}

// Decimal writes a number with as few digits as identify it: 0.1, 2e-4.
func Decimal(x float64) string {
	format := byte('g')
	if x != 0 && math.Abs(x) < 1e-3 {
		format = 'e'
	}
	return strings.Replace(strconv.FormatFloat(x, format, -1, 64), "e-0", "e-", 1)
}

// article names a field's type: "an integer".
func article(field protoreflect.FieldDescriptor) string {
	switch field.Kind() {
	case protoreflect.StringKind:
		return "a string"
	case protoreflect.BoolKind:
		return "a boolean"
	case protoreflect.DoubleKind:
		return "a number"
	}
	return "an integer"
}

func plural(field protoreflect.FieldDescriptor) string {
	_, noun, _ := strings.Cut(article(field), " ")
	return noun + "s"
}

// sample is a value to show, as TOML: the example, else the default, else any of the type.
func sample(field key) string {
	for _, text := range []string{metaOf(field).GetExample(), field.defaultText()} {
		if text != "" {
			return text
		}
	}
	switch field.Kind() {
	case protoreflect.BoolKind:
		return "true"
	case protoreflect.StringKind:
		return `"..."`
	}
	return "1"
}

// limitsOf describes the range of a field: "between 1 and 1024", "above 0 and at most 1".
func limitsOf(field protoreflect.FieldDescriptor) string {
	lower, upper := "", ""
	rules := rulesOf(field).ProtoReflect()
	if rules.IsValid() {
		if one := rules.WhichOneof(rules.Descriptor().Oneofs().ByName("type")); one != nil && one.Message() != nil {
			inner := rules.Get(one).Message()
			inner.Range(func(rule protoreflect.FieldDescriptor, v protoreflect.Value) bool {
				switch rule.Name() {
				case "gte":
					lower = "at least " + number(v)
				case "gt":
					lower = "above " + number(v)
				case "lte":
					upper = "at most " + number(v)
				case "lt":
					upper = "below " + number(v)
				}
				return true
			})
		}
	}
	unsigned := field.Kind() == protoreflect.Uint32Kind || field.Kind() == protoreflect.Uint64Kind
	if lower == "" && unsigned {
		lower = "at least 0"
	}
	low, lowOK := strings.CutPrefix(lower, "at least ")
	high, highOK := strings.CutPrefix(upper, "at most ")
	switch {
	case lowOK && highOK:
		return fmt.Sprintf("between %s and %s", low, high)
	case lower != "" && upper != "":
		return lower + " and " + upper
	case field.Kind() == protoreflect.Uint32Kind:
		return fmt.Sprintf("between %s and 4294967295", low)
	}
	return lower + upper
}

func number(v protoreflect.Value) string {
	if f, ok := v.Interface().(float64); ok {
		return strconv.FormatFloat(f, 'g', -1, 64)
	}
	return v.String()
}

func fixRange(field key) string {
	if text := field.defaultText(); text != "" {
		return fmt.Sprintf("write a number %s; the default is %s", limitsOf(field), text)
	}
	return fmt.Sprintf("write a number %s, such as `%s = %s`", limitsOf(field), field.TextName(), sample(field))
}

// quoted joins `a`, `b` and `c`.
func quoted(items []string, last string) string {
	for i, item := range items {
		items[i] = "`" + item + "`"
	}
	return enumerate(items, last)
}

func enumerate(items []string, last string) string {
	if len(items) < 2 {
		return strings.Join(items, "")
	}
	return strings.Join(items[:len(items)-1], ", ") + " " + last + " " + items[len(items)-1]
}
