package config

import (
	"fmt"
	"strings"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"google.golang.org/protobuf/reflect/protoreflect"
)

func root() protoreflect.MessageDescriptor {
	return (&configv1.RunConfig{}).ProtoReflect().Descriptor()
}

// example is a line that sets the field.
func example(field protoreflect.FieldDescriptor) string {
	return fmt.Sprintf("write `%s = %s`", field.TextName(), sample(field))
}

// tableExample is a table with everything that it must hold.
func tableExample(path string, message protoreflect.MessageDescriptor) string {
	var lines []string
	for i := range message.Fields().Len() {
		if field := message.Fields().Get(i); rulesOf(field).GetRequired() && field.Message() == nil {
			lines = append(lines, fmt.Sprintf("`%s = %s`", field.TextName(), sample(field)))
		}
	}
	if len(lines) == 0 {
		return "[" + path + "]"
	}
	return fmt.Sprintf("[%s] with %s", path, enumerate(lines, "and"))
}

// fieldAt is the field at a dotted path, nil where there is none.
func fieldAt(path string) protoreflect.FieldDescriptor {
	message := root()
	var found protoreflect.FieldDescriptor
	keys := strings.Split(path, ".")
	for i := 0; i < len(keys); i++ {
		if message == nil {
			return nil
		}
		if found = message.Fields().ByTextName(keys[i]); found == nil {
			return nil
		}
		if message = found.Message(); found.IsMap() {
			i++ // the name of a table
			message = found.MapValue().Message()
		}
	}
	return found
}

// oneofTables are the tables of which the table at path holds exactly one.
func oneofTables(path string) []string {
	var names []string
	walk(root(), "", func(at string, field protoreflect.FieldDescriptor) {
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

// slugify makes a run's name of a text.
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
