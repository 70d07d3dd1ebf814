package input

import (
	"encoding/json"
	"slices"
	"strings"
)

// Shape has the sizes of a transformer that decide how much memory its activations and its KV cache
// take. A size is 0 if config.json doesn't state it.
type Shape struct {
	Layers, Hidden, Intermediate int64
	Heads, KVHeads, HeadDim      int64
	Vocabulary                   int64
	Experts, Active, ExpertSize  int64 // experts of a layer, those that a token uses, and the intermediate size of one
	QKNorm                       bool  // whether queries and keys are normalized
}

// shapeOf reads the names that models of transformers use.
func shapeOf(config map[string]json.RawMessage) Shape {
	s := Shape{
		Layers:       number(config, "num_hidden_layers", "n_layer", "num_layers"),
		Hidden:       number(config, "hidden_size", "n_embd", "d_model"),
		Intermediate: number(config, "intermediate_size", "n_inner", "ffn_dim"),
		Heads:        number(config, "num_attention_heads", "n_head"),
		KVHeads:      number(config, "num_key_value_heads"),
		HeadDim:      number(config, "head_dim"),
		Vocabulary:   number(config, "vocab_size"),
		Experts:      number(config, "num_experts", "num_local_experts", "n_routed_experts"),
		Active:       number(config, "num_experts_per_tok"),
		ExpertSize:   number(config, "moe_intermediate_size"),
	}
	if s.Intermediate == 0 {
		s.Intermediate = 4 * s.Hidden // GPT-2
	}
	if s.KVHeads == 0 {
		s.KVHeads = s.Heads
	}
	if s.HeadDim == 0 && s.Heads > 0 {
		s.HeadDim = s.Hidden / s.Heads
	}
	if s.ExpertSize == 0 {
		s.ExpertSize = s.Intermediate
	}
	return s
}

// Shape has the sizes of the model.
func (m *Model) Shape() Shape {
	shape := m.shape
	shape.QKNorm = slices.ContainsFunc(m.Tensors, func(name string) bool { return strings.HasSuffix(name, ".q_norm.weight") })
	return shape
}

// Elements is the number of elements of the tensors whose names a function accepts.
func (m *Model) Elements(accepts func(name string) bool) int64 {
	total := int64(0)
	for _, name := range m.Tensors {
		if accepts(name) {
			total += product(m.shapes[name])
		}
	}
	return total
}

// Block is the number of elements of the largest layer of the model.
func (m *Model) Block() int64 {
	blocks := map[string]int64{}
	most := int64(0)
	for _, name := range m.Tensors {
		if block := blockOf(name); block != "" {
			blocks[block] += product(m.shapes[name])
			most = max(most, blocks[block])
		}
	}
	return most
}

// blockOf is `model.layers.3` for `model.layers.3.mlp.up_proj.weight`; "" outside of the layers.
func blockOf(name string) string {
	parts := strings.Split(name, ".")
	at := slices.IndexFunc(parts, func(part string) bool { return part != "" && strings.Trim(part, "0123456789") == "" })
	if at < 1 {
		return ""
	}
	return strings.Join(parts[:at+1], ".")
}

// Linear is the number of input and output features of all linear layers with one of these names,
// and how many there are.
func (m *Model) Linear(names []string) (in, out, layers int64) {
	for _, tensor := range m.Tensors {
		layer, ok := strings.CutSuffix(tensor, ".weight")
		shape := m.shapes[tensor]
		if ok && len(shape) == 2 && slices.Contains(names, layer[strings.LastIndexByte(layer, '.')+1:]) {
			out, in, layers = out+shape[0], in+shape[1], layers+1
		}
	}
	return in, out, layers
}

func product(shape []int64) int64 {
	n := int64(1)
	for _, size := range shape {
		n *= size
	}
	return n
}
