package config

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/rollout-rl/rollout/services/planner/document"
	"github.com/rollout-rl/rollout/services/planner/problem"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// binder sets the fields of a configuration from a text and reports keys and types that do not fit.
type binder struct{ *Reading }

// bind sets the fields of m from a table; at is the table's dotted path, "" for the root.
func (r *binder) bind(table *document.Value, m protoreflect.Message, at string) {
	for _, e := range table.Entries {
		field := keyOf(m.Descriptor(), e.Key)
		if field == nil {
			r.unknown(e, m.Descriptor(), at)
			continue
		}
		path := join(at, e.Key)
		if one := field.ContainingOneof(); one != nil && !one.IsSynthetic() {
			if other := m.WhichOneof(one); other != nil {
				r.twoOfOne(e, path, join(at, other.TextName()))
				continue
			}
		}
		if field.Message() != nil {
			r.bindTable(e, *field, m, path)
			continue
		}
		r.bindScalar(e, *field, field.holder(m), path)
	}
}

func (r *binder) bindTable(e *document.Entry, field key, m protoreflect.Message, path string) {
	if e.Value.Kind != document.Table {
		fix := fmt.Sprintf("write a table: [%s]", path)
		if e.Value.Kind == document.String && !field.IsMap() && keyOf(field.Message(), e.Value.String) != nil {
			fix = fmt.Sprintf("write a table: [%s.%s]", path, e.Value.String)
		}
		r.wrongType(e.Value.Span, path, fmt.Sprintf("`%s` is a table, got %s", path, e.Value.Kind), fix)
		return
	}
	if field.IsMap() {
		r.bindNamed(e.Value, field, m.Mutable(field.FieldDescriptor).Map(), path)
		return
	}
	r.bind(e.Value, m.Mutable(field.FieldDescriptor).Message(), path)
}

// bindNamed sets tables whose names the user chooses.
func (r *binder) bindNamed(table *document.Value, field key, named protoreflect.Map, path string) {
	for _, e := range table.Entries {
		at := join(path, e.Key)
		if e.Value.Kind != document.Table {
			r.wrongType(e.Span, at, fmt.Sprintf("[%s] contains tables with names that you choose, not the key `%s`", path, e.Key), fixNamed(field, path, e.Key))
			continue
		}
		r.bind(e.Value, named.Mutable(protoreflect.ValueOfString(e.Key).MapKey()).Message(), at)
	}
}

// fixNamed suggests the place of a key that was written among named tables.
func fixNamed(field key, path, name string) string {
	if keyOf(field.MapValue().Message(), name) != nil {
		return fmt.Sprintf("write it below [%s.NAME]", path)
	}
	return fmt.Sprintf("write [%s.%s]", path, name)
}

func (r *binder) bindScalar(e *document.Entry, field key, m protoreflect.Message, path string) {
	if metaOf(field).GetJson() {
		if text, ok := r.freeTable(e, path); ok {
			m.Set(field.FieldDescriptor, protoreflect.ValueOfString(text))
		}
		return
	}
	if !field.IsList() {
		if value, ok := r.scalar(e, e.Value, field, path); ok {
			m.Set(field.FieldDescriptor, value)
		}
		return
	}
	if e.Value.Kind != document.Array {
		r.wrongType(e.Value.Span, path, fmt.Sprintf("`%s` is a list of %s, got %s", path, plural(field), e.Value.Kind),
			fmt.Sprintf("write `%s = [%s]`", e.Key, listText(e, field)))
		return
	}
	list := m.Mutable(field.FieldDescriptor).List()
	for _, item := range e.Value.Items {
		value, ok := r.scalar(e, item, field, path)
		if !ok {
			return
		}
		list.Append(value)
	}
}

// freeTable is a table of free keys, or a string with a JSON object, as JSON with sorted keys.
func (r *binder) freeTable(e *document.Entry, path string) (string, bool) {
	value := any(nil)
	problem := e.Value.Kind.String()
	switch e.Value.Kind {
	case document.String:
		if err := json.Unmarshal([]byte(e.Value.String), &value); err != nil {
			problem = "a string that is not JSON"
		}
	default:
		if bad := plain(e.Value, &value); bad != nil {
			r.wrongType(bad.Span, path, fmt.Sprintf("`%s` has %s, which JSON can't hold", path, bad.Kind), "write it as a string")
			return "", false
		}
	}
	if _, table := value.(map[string]any); !table {
		r.wrongType(e.Value.Span, path, fmt.Sprintf("`%s` is a table, got %s", path, problem), fmt.Sprintf("write a table: [%s]", path))
		return "", false
	}
	text, err := json.Marshal(value)
	if err != nil { // an infinite number
		r.wrongType(e.Value.Span, path, fmt.Sprintf("`%s` can't be written as JSON: %v", path, err), "write it as a string")
		return "", false
	}
	return string(text), true
}

// plain stores a value as Go's JSON types, or returns the value inside of it that has no such type.
func plain(v *document.Value, to *any) *document.Value {
	switch v.Kind {
	case document.Table:
		table := map[string]any{}
		for _, e := range v.Entries {
			var value any
			if bad := plain(e.Value, &value); bad != nil {
				return bad
			}
			table[e.Key] = value
		}
		*to = table
	case document.Array:
		items := make([]any, len(v.Items))
		for i, item := range v.Items {
			if bad := plain(item, &items[i]); bad != nil {
				return bad
			}
		}
		*to = items
	case document.String:
		*to = v.String
	case document.Integer:
		*to = v.Integer
	case document.Float:
		if math.IsNaN(v.Float) || math.IsInf(v.Float, 0) {
			return v
		}
		text := strconv.FormatFloat(v.Float, 'g', -1, 64)
		if !strings.ContainsAny(text, ".e") {
			text += ".0" // so that Python reads a float
		}
		*to = json.RawMessage(text)
	case document.Bool:
		*to = v.Bool
	case document.DateTime:
		return v
	}
	return nil
}

// listText is the value of an entry as the items of a list. Bare words of an override are quoted.
func listText(e *document.Entry, field key) string {
	text := e.Value.Span.Text()
	if !e.Bare || field.Kind() != protoreflect.StringKind {
		return text
	}
	items := strings.Split(strings.Trim(text, "[] "), ",")
	for i, item := range items {
		items[i] = strconv.Quote(strings.Trim(item, " \"'"))
	}
	return strings.Join(items, ", ")
}

// scalar reads one value as the type of the field.
func (r *binder) scalar(e *document.Entry, v *document.Value, field key, path string) (protoreflect.Value, bool) {
	none := protoreflect.Value{}
	switch kind := field.Kind(); {
	case kind == protoreflect.StringKind && v.Kind == document.String:
		return protoreflect.ValueOfString(v.String), true
	case kind == protoreflect.BoolKind && v.Kind == document.Bool:
		return protoreflect.ValueOfBool(v.Bool), true
	case kind == protoreflect.DoubleKind && v.Kind == document.Float && math.IsNaN(v.Float):
		r.outOfRange(v.Span, path, fmt.Sprintf("`%s` is not a number", path), "write a number")
		return none, false
	case kind == protoreflect.DoubleKind && v.Kind == document.Float:
		return protoreflect.ValueOfFloat64(v.Float), true
	case kind == protoreflect.DoubleKind && v.Kind == document.Integer:
		return protoreflect.ValueOfFloat64(float64(v.Integer)), true
	case (kind == protoreflect.Uint32Kind || kind == protoreflect.Uint64Kind) && v.Kind == document.Integer:
		if limits := limitsOf(field); v.Integer < 0 || kind == protoreflect.Uint32Kind && v.Integer > math.MaxUint32 {
			r.outOfRange(v.Span, path, fmt.Sprintf("`%s` must be %s, got %s", path, limits, v.Span.Text()), fixRange(field))
			return none, false
		}
		if kind == protoreflect.Uint32Kind {
			return protoreflect.ValueOfUint32(uint32(v.Integer)), true
		}
		return protoreflect.ValueOfUint64(uint64(v.Integer)), true
	case kind == protoreflect.StringKind && e.Bare:
		return protoreflect.ValueOfString(v.String), true
	}
	got := v.Kind.String()
	if e.Bare {
		got = "a bare word"
	}
	r.wrongType(v.Span, path, fmt.Sprintf("`%s` is %s, got %s", path, article(field), got), fixType(e, v, field))
	return none, false
}

// fixType suggests the value in the type of the field.
func fixType(e *document.Entry, v *document.Value, field key) string {
	text := v.Span.Text()
	switch kind := field.Kind(); {
	case field.IsList():
		return fmt.Sprintf("write `%s = [\"...\"]`", e.Key)
	case kind == protoreflect.StringKind && v.Kind != document.Table && v.Kind != document.Array:
		return fmt.Sprintf("put it in quotes: `%s = \"%s\"`", e.Key, text)
	case field.FullName() == "rollout.config.v1.DataConfig.train" && v.Kind == document.Array:
		return fmt.Sprintf("write one glob, such as `%s = \"data/*.jsonl\"`, or a table [data.train_mix.NAME] with `path` for each file", e.Key)
	case kind == protoreflect.StringKind:
		return fmt.Sprintf("write one string, such as `%s = %s`", e.Key, sample(field))
	case kind == protoreflect.BoolKind:
		return fmt.Sprintf("write `%s = true` or `%s = false`", e.Key, e.Key)
	case v.Kind == document.String && looksNumeric(v.String):
		return fmt.Sprintf("remove the quotes: `%s = %s`", e.Key, v.String)
	case v.Kind == document.Float && v.Float == math.Trunc(v.Float) && math.Abs(v.Float) < 1e15:
		return fmt.Sprintf("write `%s = %.0f`", e.Key, v.Float)
	}
	return fmt.Sprintf("write a number, such as `%s = %s`", e.Key, sample(field))
}

func (r *binder) twoOfOne(e *document.Entry, path, other string) {
	line, _ := r.root.Find(other).Value.Span.Position()
	r.broken[path] = true
	r.Problems.At(e.Value.Span, problem.Conflict, path,
		fmt.Sprintf("a run has one algorithm, and [%s] conflicts with [%s] on line %d", path, other, line), "remove one of the two tables")
}

func (r *binder) wrongType(span document.Span, path, message, fix string) {
	r.broken[path] = true
	r.Problems.At(span, problem.WrongType, path, message, fix)
}

func (r *binder) outOfRange(span document.Span, path, message, fix string) {
	r.broken[path] = true
	r.Problems.At(span, problem.OutOfRange, path, message, fix)
}

func looksNumeric(s string) bool {
	return s != "" && strings.Trim(s, "0123456789.eE+-_") == "" && strings.ContainsAny(s, "0123456789")
}
