// Package setting lists the settings of a run's configuration by their key in TOML.
package setting

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/rollout-rl/rollout/libs/algorithm"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Of returns the fields that are set, by key; the value is TOML. A table without keys, such as that
// of an algorithm, is {}.
func Of(config *configv1.RunConfig) map[string]string {
	settings := map[string]string{}
	add("", config.ProtoReflect(), settings)
	return settings
}

// TOML returns the settings as lines of TOML, sorted by key.
func TOML(config *configv1.RunConfig) string {
	var b strings.Builder
	settings := Of(config)
	for _, key := range slices.Sorted(maps.Keys(settings)) {
		b.WriteString(key + " = " + settings[key] + "\n")
	}
	return b.String()
}

func add(prefix string, m protoreflect.Message, to map[string]string) {
	for field, value := range m.Range {
		key := prefix + field.TextName()
		switch {
		case algorithm.Inlined(field):
			add(prefix, value.Message(), to)
		case field.IsMap():
			for name, entry := range value.Map().Range {
				add(key+"."+strconv.Quote(name.String())+".", entry.Message(), to)
			}
		case field.IsList():
			var items []string
			for i := range value.List().Len() {
				items = append(items, text(value.List().Get(i)))
			}
			to[key] = "[" + strings.Join(items, ", ") + "]"
		case field.Message() != nil:
			before := len(to)
			add(key+".", value.Message(), to)
			if len(to) == before {
				to[key] = "{}"
			}
		default:
			to[key] = text(value)
		}
	}
}

func text(value protoreflect.Value) string {
	switch v := value.Interface().(type) {
	case string:
		return strconv.Quote(v)
	case float64:
		s := strconv.FormatFloat(v, 'g', -1, 64)
		if !strings.ContainsAny(s, ".einf") { // a float of TOML has a point or an exponent
			s += ".0"
		}
		return s
	}
	return value.String()
}
