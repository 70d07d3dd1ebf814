package config

import (
	"fmt"
	"strings"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/engine"
	"github.com/rollout-rl/rollout/services/planner/document"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// defaults fills in every default. Tables with required keys, and the algorithm, have none.
func (r *Reading) defaults() {
	for path, text := range algorithm.Defaults(r.Config) {
		setDefault(r.Config.ProtoReflect(), path, text)
	}
	fill(r.Config.ProtoReflect())
	if r.Config.Deterministic == nil {
		promised := r.Config.GetMode() == "sync" && !algorithm.External(r.Config) && promises(r.Config.GetEngine().GetKind())
		r.Config.Deterministic = proto.Bool(promised)
	}
}

// promises reports whether an engine can give equal bits; of an unknown one, which is reported
// elsewhere, it is not known.
func promises(kind string) bool {
	engines, err := engine.All()
	found, known := engines[kind]
	return err == nil && (found.Deterministic || !known)
}

// setDefault sets the key at a path, unless it is set or a required table above it is absent.
func setDefault(m protoreflect.Message, path, text string) {
	name, rest, nested := strings.Cut(path, ".")
	field := keyOf(m.Descriptor(), name)
	if field == nil {
		panic(fmt.Sprintf("the contract has a default for the unknown key %s of %s", name, m.Descriptor().FullName()))
	}
	holder := field.holder(m)
	switch has := holder.Has(field.FieldDescriptor); {
	case nested && (has || optional(field)):
		setDefault(holder.Mutable(field.FieldDescriptor).Message(), rest, text)
	case !nested && !has:
		holder.Set(field.FieldDescriptor, literal(*field, text))
	}
}

// fill sets the absent keys of a table to their defaults.
func fill(m protoreflect.Message) {
	for _, field := range keysOf(m.Descriptor()) {
		holder := field.holder(m)
		switch {
		case field.IsMap():
			holder.Get(field.FieldDescriptor).Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
				fill(v.Message())
				return true
			})
		case field.Message() != nil:
			if holder.Has(field.FieldDescriptor) || optional(field) {
				fill(holder.Mutable(field.FieldDescriptor).Message())
			}
		default:
			if text := field.defaultText(); text != "" && !holder.Has(field.FieldDescriptor) && !field.IsList() {
				holder.Set(field.FieldDescriptor, literal(field, text))
			}
		}
	}
}

// optional reports whether an absent table means a table of defaults.
func optional(field protoreflect.FieldDescriptor) bool {
	if field.ContainingOneof() != nil || rulesOf(field).GetRequired() || metaOf(field).GetAbsent() {
		return false
	}
	for _, inner := range keysOf(field.Message()) {
		if rulesOf(inner).GetRequired() || inner.Message() != nil && !inner.IsMap() && !optional(inner) {
			return false
		}
	}
	return true
}

// literal reads a default of the contract. A default of the wrong type is a mistake in the
// contract, which a test finds.
func literal(field key, text string) protoreflect.Value {
	root, faults := document.Parse(document.NewSource("default", []byte("x = "+text), 1))
	if len(faults) == 0 {
		r := &binder{&Reading{broken: map[string]bool{}}}
		if metaOf(field).GetJson() {
			if text, ok := r.freeTable(root.Entries[0], field.TextName()); ok {
				return protoreflect.ValueOfString(text)
			}
		}
		if v, ok := r.scalar(root.Entries[0], root.Entries[0].Value, field, field.TextName()); ok {
			return v
		}
	}
	panic(fmt.Sprintf("the default of %s has another type: %s", field.FullName(), text))
}
