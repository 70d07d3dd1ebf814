// Package config turns a TOML text into a RunConfig, by reflection over the contract: the proto is
// the only list of keys, types, defaults, ranges, and rules. One pass finds every mistake, with its
// line and column.
//
//	text -> document.Value -> bind (keys, types) -> defaults -> rules (protovalidate) -> RunConfig | problems
package config

import (
	"bytes"
	"fmt"
	"strings"

	"buf.build/go/protovalidate"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/document"
	"github.com/rollout-rl/rollout/services/planner/problem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// overrideFile is the name of the pseudo-file whose lines are the overrides.
const overrideFile = "--set"

// Reader reads configurations. It is safe for concurrent use.
type Reader struct{ validator protovalidate.Validator }

// NewReader compiles the rules once.
func NewReader() (*Reader, error) {
	validator, err := protovalidate.New(protovalidate.WithMessages(&configv1.RunConfig{}))
	if err != nil {
		return nil, fmt.Errorf("compile the rules of a configuration: %w", err)
	}
	return &Reader{validator}, nil
}

// Reading is the result of reading a configuration.
type Reading struct {
	// Config has every default filled in. If there are problems, it lacks the values that could not be
	// read.
	Config   *configv1.RunConfig
	Problems problem.List

	root   *document.Value
	source *document.Source
	broken map[string]bool // keys without a readable value: no rule is checked for them
	holes  bool            // whether a part of the text could not be parsed: no key is reported as missing
}

// Read reads a configuration. It never fails: it returns problems instead.
func (r *Reader) Read(source *planv1.ConfigSource) *Reading {
	text := bytes.TrimPrefix(source.GetToml(), []byte("\xef\xbb\xbf"))
	reading := &Reading{
		Config: &configv1.RunConfig{},
		source: document.NewSource(source.GetFile(), text, 1),
		broken: map[string]bool{},
	}
	root, faults := document.Parse(reading.source)
	if len(faults) > 0 && bytes.HasPrefix(bytes.TrimSpace(text), []byte("{")) { // else each line is a fault
		faults[0].Message, faults[0].Fix = "this is JSON, which a plan is written in, not a configuration", "pass a plan with `rollout run --plan FILE`, or write the configuration in TOML"
		faults = faults[:1]
		root, _ = document.Parse(document.NewSource(source.GetFile(), nil, 1))
	}
	reading.root = root
	reading.faults(faults)
	reading.override(source.GetSet())
	(&binder{reading}).bind(root, reading.Config.ProtoReflect(), "")
	reading.defaults()
	check := &checker{reading}
	check.rules(r.validator)
	check.idle()
	return reading
}

// Again checks a configuration without its text, so its problems have no place. set: overrides of
// the configuration; their problems have the number of the override.
func (r *Reader) Again(config *configv1.RunConfig, set ...string) *Reading {
	reading := &Reading{Config: proto.CloneOf(config), source: document.NewSource("", nil, 1), broken: map[string]bool{}}
	if reading.Config == nil {
		reading.Config = &configv1.RunConfig{}
	}
	reading.root, _ = document.Parse(reading.source)
	reading.override(set)
	(&binder{reading}).bind(reading.root, reading.Config.ProtoReflect(), "")
	reading.defaults()
	(&checker{reading}).rules(r.validator)
	return reading
}

// override adds overrides to the text.
func (r *Reading) override(set []string) {
	for i, override := range set {
		r.faults(document.Override(r.root, override, i+1))
	}
}

// faults reports errors of the syntax.
func (r *Reading) faults(faults []document.Fault) {
	for _, fault := range faults {
		reason := problem.DuplicateKey
		if !fault.Duplicate {
			reason, r.holes = problem.Syntax, true
		}
		r.Problems.At(fault.Span, reason, "", fault.Message, fault.Fix)
	}
}

// Place is the place of a key: its value, or the header of the nearest table that contains it, or
// the end of the text.
func (r *Reading) Place(field string) document.Span {
	if e := r.root.Find(field); e != nil {
		return e.Value.Span
	}
	for table := parent(field); table != ""; table = parent(table) {
		if e := r.root.Find(table); e != nil {
			return e.Value.Span
		}
	}
	if r.source.Name == "" {
		return document.Span{}
	}
	return r.source.End()
}

// Wrote reports whether the text sets a key.
func (r *Reading) Wrote(field string) bool { return r.root.Find(field) != nil }

// Value is the value of a key as TOML; "" if the configuration has no value for it.
func (r *Reading) Value(path string) string {
	k, value, ok := r.lookup(path)
	switch {
	case !ok || k.Message() != nil:
		return ""
	case k.IsList():
		items := make([]string, value.List().Len())
		for i := range items {
			items[i] = tomlText(*k, value.List().Get(i))
		}
		return "[" + strings.Join(items, ", ") + "]"
	}
	return tomlText(*k, value)
}

// lookup finds a key and its value by its path. ok: the contract has the key, and it is set or a
// list.
func (r *Reading) lookup(path string) (k *key, value protoreflect.Value, ok bool) {
	value = protoreflect.ValueOfMessage(r.Config.ProtoReflect())
	for name := range strings.SplitSeq(path, ".") {
		if k != nil && k.Message() == nil {
			return nil, value, false
		}
		table := value.Message()
		if k = keyOf(table.Descriptor(), name); k == nil {
			return nil, value, false
		}
		if k.inlined != nil {
			table = table.Get(k.inlined).Message()
		}
		if !k.IsList() && !table.Has(k.FieldDescriptor) {
			return nil, value, false
		}
		value = table.Get(k.FieldDescriptor)
	}
	return k, value, true
}

// Readable reports whether a key or table, with all keys in it, could be read.
func (r *Reading) Readable(field string) bool { return !r.brokenUnder(field) }

// Sorted returns the problems in the order of the file, then of the overrides.
func (r *Reading) Sorted() []*planv1.Problem { return r.Problems.Sorted(r.source.Name, overrideFile) }
