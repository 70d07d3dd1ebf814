package config

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/pelletier/go-toml/v2"
	"github.com/rollout-rl/rollout/services/planner/document"
)

//go:embed foreign.toml
var foreignText []byte

// trainers are the sections of foreign.toml with the names of keys, in the order of precedence, and
// the names of the trainers.
var trainers = []struct{ section, title string }{{"trl", "TRL"}, {"verl", "verl"}, {"openrlhf", "OpenRLHF"}, {"other", "other trainers"}}

// translation is an entry of foreign.toml, which describes Key, Or, and Note.
type translation struct {
	Key  string `toml:"key"`
	Or   string `toml:"or"`
	Note string `toml:"note"`

	trainer, name string
}

// translations reads the names of keys in foreign.toml, in the order of precedence. A test checks
// the file.
var translations = sync.OnceValue(func() []translation {
	var all []translation
	sections := foreignSections()
	for _, trainer := range trainers {
		entries := sections[trainer.section]
		for _, name := range slices.Sorted(maps.Keys(entries)) {
			entry := entries[name]
			entry.trainer, entry.name = trainer.title, name
			all = append(all, entry)
		}
	}
	return all
})

var foreignSections = sync.OnceValue(func() map[string]map[string]translation {
	var sections map[string]map[string]translation
	if err := toml.Unmarshal(foreignText, &sections); err != nil {
		panic(fmt.Sprintf("foreign.toml: %v", err))
	}
	return sections
})

// foreignKey is what a key of another trainer is called here.
type foreignKey struct {
	trainer string
	target  string // path of the key or table here; "" without one
	note    string // the suggestion, if the value translates
}

// foreign finds a key of another trainer by its name, or by its path or the end of its path in a
// nested configuration; nil if no trainer has it. Names of command-line flags are read too.
func foreign(at, name, algorithm string) *foreignKey {
	name = strings.ToLower(strings.ReplaceAll(strings.TrimLeft(name, "-"), "-", "_"))
	path := join(at, name)
	for _, matches := range []func(entry string) bool{ // from the most to the least specific
		func(entry string) bool { return entry == path },
		func(entry string) bool { return at != "" && strings.HasSuffix(entry, "."+path) },
		func(entry string) bool { return entry == name },
		func(entry string) bool {
			start, wild := strings.CutSuffix(entry, "*")
			return wild && (strings.HasPrefix(path, start) || strings.HasPrefix(name, start))
		},
	} {
		for _, entry := range translations() {
			if matches(entry.name) {
				return entry.resolve(algorithm)
			}
		}
	}
	return nil
}

// foreignTable reports whether a path is that of a table with keys in the configuration of another
// trainer.
func foreignTable(path string) bool {
	return slices.ContainsFunc(translations(), func(entry translation) bool {
		return strings.HasPrefix(entry.name, path+".") || strings.Contains(entry.name, "."+path+".")
	})
}

// tableAlias is the path of the table that others call name; "" without one.
func tableAlias(name string) string { return foreignSections()["tables"][strings.ToLower(name)].Key }

// resolve puts the chosen algorithm into a translation; GRPO without one.
func (t translation) resolve(algorithm string) *foreignKey {
	if algorithm == "" {
		algorithm = "grpo"
	}
	chosen := func(text string) string { return strings.ReplaceAll(text, "algorithm.*", "algorithm."+algorithm) }
	found := &foreignKey{trainer: t.trainer}
	for _, path := range []string{t.Key, t.Or} {
		if path = chosen(path); path != "" && keyAt(path) != nil {
			found.target, found.note = path, chosen(t.Note)
			return found
		}
	}
	if found.note = t.Note; t.Key != "" {
		found.note = fmt.Sprintf("remove it: [algorithm.%s] has no such setting", algorithm)
	}
	return found
}

// fix suggests the key, with the value of the text if it fits.
func (f *foreignKey) fix(at, value string) string {
	if f.note != "" {
		return f.note
	}
	k := keyAt(f.target)
	if tableOf(k) != nil {
		return fmt.Sprintf("write [%s]", f.target)
	}
	where := ""
	if parent(f.target) != at {
		where = " " + home(f.target)
	}
	if !fits(*k, value) {
		return fmt.Sprintf("its name is `%s`%s", k.TextName(), where)
	}
	return fmt.Sprintf("write `%s = %s`%s", k.TextName(), value, where)
}

// fits reports whether a value of one line, as TOML, has the type of a key.
func fits(k key, value string) bool {
	root, faults := document.Parse(document.NewSource("", []byte("x = "+value), 1))
	if len(faults) > 0 || len(root.Entries) != 1 {
		return false
	}
	e, r := root.Entries[0], &binder{&Reading{broken: map[string]bool{}}}
	values := []*document.Value{e.Value}
	if k.IsList() {
		values = e.Value.Items
	}
	return len(values) > 0 && !slices.ContainsFunc(values, func(v *document.Value) bool {
		_, ok := r.scalar(e, v, k, "")
		return !ok
	})
}
