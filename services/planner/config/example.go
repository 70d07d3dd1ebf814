package config

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// example is a line that sets the field.
func example(field key) string {
	return fmt.Sprintf("write `%s = %s`", field.TextName(), sample(field))
}

// tableExample is a table with its required keys, and the first key of each choice.
func tableExample(path string, message protoreflect.MessageDescriptor) string {
	var lines []string
	chosen := map[string]bool{"": true}
	for _, field := range keysOf(message) {
		choice := metaOf(field).GetChoice()
		if (rulesOf(field).GetRequired() || !chosen[choice]) && field.Message() == nil {
			chosen[choice] = true
			lines = append(lines, fmt.Sprintf("`%s = %s`", field.TextName(), sample(field)))
		}
	}
	if len(lines) == 0 { // one of several keys is required
		for _, field := range keysOf(message) {
			if metaOf(field).GetExample() != "" && field.Message() == nil {
				return fmt.Sprintf("[%s] with `%s = %s`", path, field.TextName(), sample(field))
			}
		}
		return "[" + path + "]"
	}
	return fmt.Sprintf("[%s] with %s", path, enumerate(lines, "and"))
}

// oneofTables are the alternative tables at a path, of which exactly one must be set.
func oneofTables(path string) []string {
	var names []string
	walk(root(), "", func(at string, field key) {
		if one := field.ContainingOneof(); one != nil && !one.IsSynthetic() && parent(at) == path {
			names = append(names, "["+at+"]")
		}
	})
	return names
}

func alternatives(texts []string) string {
	out := make([]string, len(texts))
	for i, text := range texts {
		out[i] = fmt.Sprintf("%q", text)
	}
	return enumerate(out, "or")
}

// slugify turns a text into a valid name of a run.
func slugify(text string) string {
	var b strings.Builder
	for _, c := range strings.ToLower(text) {
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' {
			b.WriteRune(c)
		} else if b.Len() > 0 && !strings.HasSuffix(b.String(), "-") {
			b.WriteByte('-')
		}
	}
	return strings.Trim(b.String()[:min(63, b.Len())], "-")
}
