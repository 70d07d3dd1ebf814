package config

import (
	"fmt"

	"github.com/rollout-rl/rollout/services/planner/document"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// defaults writes out every default. A table that must hold something, and an algorithm, is never made up.
func (r *Reading) defaults() {
	fill(r.Config.ProtoReflect())
	if r.Config.Deterministic == nil {
		r.Config.Deterministic = proto.Bool(r.Config.GetMode() == "sync")
	}
}

func fill(m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		if field.IsMap() {
			m.Get(field).Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
				fill(v.Message())
				return true
			})
			continue
		}
		if field.Message() != nil {
			if m.Has(field) || optional(field) {
				fill(m.Mutable(field).Message())
			}
			continue
		}
		if text := metaOf(field).GetDefault(); text != "" && !m.Has(field) && !field.IsList() {
			m.Set(field, literal(field, text))
		}
	}
}

// optional reports whether an absent table means a table of defaults.
func optional(field protoreflect.FieldDescriptor) bool {
	if field.ContainingOneof() != nil || rulesOf(field).GetRequired() || metaOf(field).GetAbsent() {
		return false
	}
	fields := field.Message().Fields()
	for i := range fields.Len() {
		if inner := fields.Get(i); rulesOf(inner).GetRequired() || inner.Message() != nil && !inner.IsMap() && !optional(inner) {
			return false
		}
	}
	return true
}

// literal reads a default as it stands in the contract. A default that can't be read is a mistake in the contract, which a
// test finds.
func literal(field protoreflect.FieldDescriptor, text string) protoreflect.Value {
	root, faults := document.Parse(document.NewSource("default", []byte("x = "+text), 1))
	if len(faults) == 0 {
		r := &Reading{broken: map[string]bool{}}
		if v, ok := r.scalar(root.Entries[0], root.Entries[0].Value, field, field.TextName()); ok {
			return v
		}
	}
	panic(fmt.Sprintf("the default of %s is no value of its type: %s", field.FullName(), text))
}
