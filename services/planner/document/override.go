package document

import (
	"strings"

	"github.com/pelletier/go-toml/v2/unstable"
)

// Override applies `dotted.path=value` to a tree, as line n of the pseudo-file `--set`. A value
// that is not TOML is read as a string, so that the shell needs no second quotes:
// `--set mode=async`.
func Override(root *Value, text string, n int) []Fault {
	source := NewSource("--set", []byte(text), n)
	key, value, found := strings.Cut(text, "=")
	if !found || strings.TrimSpace(key) == "" {
		return []Fault{{Span: Span{source, 0, len(text)}, Message: "the override has no `=`", Fix: "write `--set table.key=value`"}}
	}
	tree, faults := Parse(source)
	bare := false
	if len(faults) > 0 && keyParses(key) {
		tree, faults, bare = bareTree(source, key, value), nil, true
	}
	if len(faults) > 0 {
		return faults
	}
	merge(root, tree, bare)
	return nil
}

func keyParses(key string) bool {
	var p unstable.Parser
	p.Reset([]byte(key + "=0"))
	return p.NextExpression() && p.Error() == nil && p.Expression().Kind == unstable.KeyValue
}

// bareTree reads the value as a string.
func bareTree(source *Source, key, value string) *Value {
	tree, _ := Parse(NewSource(source.Name, []byte(key+"=0"), source.FirstLine))
	for v := tree; ; {
		e := v.Entries[0]
		e.Span.Source = source
		if e.Value.Kind != Table {
			trimmed := strings.TrimSpace(value)
			offset := len(key) + 1 + strings.Index(value, trimmed)
			e.Value = &Value{Kind: String, String: trimmed, Span: Span{source, offset, len(trimmed)}}
			return tree
		}
		v = e.Value
		v.Span.Source = source
	}
}

// merge copies every leaf of over to base.
func merge(base, over *Value, bare bool) {
	for _, e := range over.Entries {
		old := base.Get(e.Key)
		switch {
		case old == nil:
			markBare(e, bare)
			base.Entries = append(base.Entries, e)
		case old.Value.Kind == Table && e.Value.Kind == Table && !e.Value.inline:
			merge(old.Value, e.Value, bare)
		default:
			old.Span, old.Value, old.Bare = e.Span, e.Value, bare
		}
	}
}

func markBare(e *Entry, bare bool) {
	if e.Value.Kind != Table {
		e.Bare = bare
		return
	}
	for _, inner := range e.Value.Entries {
		markBare(inner, bare)
	}
}
