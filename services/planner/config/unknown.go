package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/nearest"
	"github.com/rollout-rl/rollout/services/planner/document"
	"github.com/rollout-rl/rollout/services/planner/problem"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// unknown reports a key or table that the contract does not have. message is that of the table at a
// path; nil within a table of another trainer's configuration.
func (r *binder) unknown(e *document.Entry, message protoreflect.MessageDescriptor, at string) {
	path := join(at, e.Key)
	if e.Value.Kind == document.Table {
		r.unknownTable(e, message, at)
		return
	}
	where := "at the top level"
	if at != "" {
		where = "in [" + at + "]"
	}
	fix, meant := r.suggest(e, message, at)
	r.Problems.At(e.Span, problem.UnknownKey, path, fmt.Sprintf("unknown key `%s` %s", e.Key, where), fix)
	if meant != "" {
		r.broken[meant] = true // no rule is checked for its default, and it is not missing
	}
}

func (r *binder) unknownTable(e *document.Entry, message protoreflect.MessageDescriptor, at string) {
	path := join(at, e.Key)
	if (message == nil || foreignTable(path)) && len(e.Value.Entries) > 0 {
		for _, inner := range e.Value.Entries {
			r.unknown(inner, nil, path)
		}
		return
	}
	names := fieldNames(message, true)
	what := fmt.Sprintf("unknown table [%s]", path)
	if at == "algorithm" {
		what = fmt.Sprintf("unknown algorithm `%s`", e.Key)
		r.broken[at] = true
	}
	var fix string
	if near := nearest.To(e.Key, names); near != "" {
		fix = fmt.Sprintf("did you mean [%s]?", join(at, near))
		r.broken[join(at, near)] = true
	} else if alias := tableAlias(e.Key); alias != "" {
		fix = fmt.Sprintf("write [%s]", alias)
		r.broken[alias] = true
	} else if full := pathOf(e.Key, "", true); full != "" {
		fix = fmt.Sprintf("write [%s]", full)
	} else if len(names) == 0 {
		fix = "remove it"
		if at != "" {
			fix = fmt.Sprintf("[%s] contains no tables: remove it", at)
		}
	} else {
		for i, name := range names {
			names[i] = "[" + join(at, name) + "]"
		}
		fix = "write " + enumerate(names, "or")
	}
	span := e.Value.Span
	if !strings.HasPrefix(span.Text(), "[") { // made by a dotted key or `{`
		span = e.Span
	}
	r.Problems.At(span, problem.UnknownKey, path, what, fix)
}

// algorithm is the name of the chosen table in [algorithm]; "" without one.
func (r *binder) algorithm() string {
	e := r.root.Find("algorithm")
	if e == nil || e.Value.Kind != document.Table {
		return ""
	}
	for _, inner := range e.Value.Entries {
		if keyAt("algorithm."+inner.Key) != nil {
			return inner.Key
		}
	}
	return ""
}

// shownKeys is the number of keys that a suggestion lists.
const shownKeys = 8

// suggest suggests a known key: by the name in other trainers, in the same table, or in another
// one. It returns the key that was probably meant, "" if none was.
func (r *binder) suggest(e *document.Entry, message protoreflect.MessageDescriptor, at string) (fix, meant string) {
	name, algorithm, siblings := e.Key, r.algorithm(), fieldNames(message, false)
	if key := foreign(at, name, algorithm); key != nil {
		return key.fix(at, e.Value.Span.Text()), key.target
	}
	if near := nearest.To(name, siblings); near != "" {
		return fmt.Sprintf("did you mean `%s`?", near), join(at, near)
	}
	if full := pathOf(name, algorithm, false); full != "" {
		return fmt.Sprintf("`%s` belongs %s", name, home(full)), full
	}
	all := leaves(algorithm)
	names := make([]string, 0, len(all))
	for _, path := range all {
		names = append(names, leafOf(path))
	}
	if near := nearest.To(name, names); near != "" {
		full := all[slices.Index(names, near)]
		return fmt.Sprintf("did you mean `%s`? It belongs %s", near, home(full)), full
	}
	switch {
	case message == nil:
		return "remove it: rollout has no such setting", ""
	case len(siblings) == 0:
		return "remove it", ""
	case len(siblings) > shownKeys:
		return fmt.Sprintf("remove it; docs/reference/config.md lists the %d keys of %s", len(siblings), tableTitle(at)), ""
	}
	return "remove it; the keys are " + quoted(siblings, "and"), ""
}

func tableTitle(at string) string {
	if at == "" {
		return "the top level"
	}
	return "[" + at + "]"
}

func home(path string) string {
	if table := parent(path); table != "" {
		return "in [" + table + "]"
	}
	return "at the top, before the first table"
}

func fieldNames(message protoreflect.MessageDescriptor, tables bool) []string {
	var names []string
	if message == nil {
		return nil
	}
	for _, field := range keysOf(message) {
		if (field.Message() != nil) == tables {
			names = append(names, field.TextName())
		}
	}
	return names
}

// pathOf is the path of the first key, or table, with a name. Only the keys of the chosen algorithm
// count, or those of all algorithms without a chosen one.
func pathOf(name, algorithm string, table bool) string {
	found := ""
	walk(root(), "", func(path string, field key) {
		if field.TextName() == name && (field.Message() != nil) == table && found == "" && inReach(path, algorithm) {
			found = path
		}
	})
	return found
}

// leaves are the paths of all keys, except those of other algorithms.
func leaves(algorithm string) []string {
	var out []string
	walk(root(), "", func(path string, field key) {
		if field.Message() == nil && inReach(path, algorithm) {
			out = append(out, path)
		}
	})
	return out
}

func inReach(path, algorithm string) bool {
	rest, ok := strings.CutPrefix(path, "algorithm.")
	return !ok || algorithm == "" || strings.HasPrefix(rest+".", algorithm+".")
}
