package config

import (
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go/buf/validate"
	"github.com/rollout-rl/rollout/libs/algorithm"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// key is a key of a TOML table: a field of the table's message, or of a message that it inlines.
type key struct {
	protoreflect.FieldDescriptor

	table   protoreflect.MessageDescriptor // of the TOML table
	inlined protoreflect.FieldDescriptor   // the table's field whose message has the key; nil: the table itself has it
}

// keysOf are the keys of a table in the order of the contract.
func keysOf(table protoreflect.MessageDescriptor) []key {
	var keys []key
	for i := range table.Fields().Len() {
		field := table.Fields().Get(i)
		if !algorithm.Inlined(field) {
			keys = append(keys, key{field, table, nil})
			continue
		}
		for j := range field.Message().Fields().Len() {
			keys = append(keys, key{field.Message().Fields().Get(j), table, field})
		}
	}
	return keys
}

// keyOf is the key of a table that has the name, nil without one.
func keyOf(table protoreflect.MessageDescriptor, name string) *key {
	for _, k := range keysOf(table) {
		if k.TextName() == name {
			return &k
		}
	}
	return nil
}

// holder is the message that has the field, within a message of the table.
func (k key) holder(table protoreflect.Message) protoreflect.Message {
	if k.inlined == nil {
		return table
	}
	return table.Mutable(k.inlined).Message()
}

// value reads the key from a message of the table.
func (k key) value(table protoreflect.Message) protoreflect.Value {
	if k.inlined != nil {
		table = table.Get(k.inlined).Message()
	}
	return table.Get(k.FieldDescriptor)
}

// defaultText is the value of the absent key, as TOML; "" without a default.
func (k key) defaultText() string {
	if text, ok := algorithm.TraitsOf(k.table).GetDefaults()[k.TextName()]; ok {
		return text
	}
	return metaOf(k).GetDefault()
}

// metaOf is the default, example and kind of a field.
func metaOf(field protoreflect.FieldDescriptor) *configv1.FieldMeta {
	meta, _ := proto.GetExtension(field.Options(), configv1.E_Meta).(*configv1.FieldMeta)
	return meta
}

func rulesOf(field protoreflect.FieldDescriptor) *validate.FieldRules {
	rules, _ := proto.GetExtension(field.Options(), validate.E_Field).(*validate.FieldRules)
	return rules
}

func root() protoreflect.MessageDescriptor {
	return (&configv1.RunConfig{}).ProtoReflect().Descriptor()
}

// tableOf is the message of the tables that a key holds: its own, or that of each named table; nil
// for a value.
func tableOf(field protoreflect.FieldDescriptor) protoreflect.MessageDescriptor {
	if field.IsMap() {
		return field.MapValue().Message()
	}
	return field.Message()
}

// keyAt is the key at a dotted path, nil without one.
func keyAt(path string) *key {
	table := root()
	var found *key
	names := strings.Split(path, ".")
	for i := 0; i < len(names); i++ {
		if table == nil {
			return nil
		}
		if found = keyOf(table, names[i]); found == nil {
			return nil
		}
		if table = tableOf(found); found.IsMap() {
			i++ // the name of a table
		}
	}
	return found
}

// tomlPath drops the inlined messages from a path of the contract: `algorithm.grpo.loss.epochs` is
// `algorithm.grpo.epochs`.
func tomlPath(path string) string {
	message := root()
	var names []string
	named := false // the next name is the user's
	for name := range strings.SplitSeq(path, ".") {
		var field protoreflect.FieldDescriptor
		if message != nil && !named {
			bare, _, _ := strings.Cut(name, "[")
			field = message.Fields().ByTextName(bare)
		}
		if named = field != nil && field.IsMap(); field != nil {
			message = tableOf(field)
		}
		if field == nil || !algorithm.Inlined(field) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ".")
}

// walk visits every key of a configuration, tables before their keys. The path of a named table has
// NAME for its name.
func walk(table protoreflect.MessageDescriptor, at string, visit func(path string, k key)) {
	for _, k := range keysOf(table) {
		path := join(at, k.TextName())
		visit(path, k)
		if inner := tableOf(k); inner != nil {
			if k.IsMap() {
				path += ".NAME"
			}
			walk(inner, path, visit)
		}
	}
}

func join(table, name string) string {
	if table == "" {
		return name
	}
	return table + "." + name
}

func parent(path string) string {
	i := strings.LastIndexByte(path, '.')
	return path[:max(i, 0)]
}

func leafOf(path string) string { return path[strings.LastIndexByte(path, '.')+1:] }
