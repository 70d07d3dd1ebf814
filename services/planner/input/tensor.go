package input

import (
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// Match returns the tensors whose names match a pattern (`model.layers.[0-3].*`, `[!...]` for all
// others).
func (m *Model) Match(pattern string) (fits []string, err error) {
	pattern = strings.ReplaceAll(pattern, "[!", "[^")
	for _, name := range m.Tensors {
		ok, err := path.Match(pattern, name)
		if err != nil {
			return nil, err
		}
		if ok {
			fits = append(fits, name)
		}
	}
	return fits, nil
}

// HasLayer reports whether the model has linear layers of this name: `q_proj` for
// `model.layers.0.self_attn.q_proj.weight`.
func (m *Model) HasLayer(name string) bool { return slices.Contains(m.Layers(), name) }

// Layers are the names of the linear layers, sorted.
func (m *Model) Layers() []string {
	var names []string
	for _, tensor := range m.Tensors {
		layer, ok := strings.CutSuffix(tensor, ".weight")
		shape, name := m.shapes[tensor], layer[strings.LastIndexByte(layer, '.')+1:]
		if ok && (len(shape) == 2 || shape == nil && !strings.Contains(layer, "norm")) && name != "lm_head" && !slices.Contains(embedders, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// embedders are the names of embedding layers in models of transformers.
var embedders = []string{"embed_tokens", "wte", "word_embeddings", "embed_in", "wpe"}

// embeddings compares the tokenizer with the model. A token without an embedding fails the run.
func (r *modelReader) embeddings() {
	m := r.model
	if m.Embedded == 0 || m.Vocabulary <= m.Embedded {
		return
	}
	r.bad("tokenizer.json", fmt.Sprintf("the tokenizer has %d tokens, the model has embeddings for %d, and rollout does not resize them", m.Vocabulary, m.Embedded),
		"use the tokenizer of the model, or call `model.resize_token_embeddings(len(tokenizer))` and save both first")
}

// resized compares the embeddings with config.json.
func (r *modelReader) resized() {
	m := r.model
	for _, tensor := range slices.Sorted(maps.Keys(m.shapes)) {
		name, shape := strings.TrimSuffix(tensor, ".weight"), m.shapes[tensor]
		position := slices.Index(embedders, name[strings.LastIndexByte(name, '.')+1:])
		if position < 0 || embedders[position] == "wpe" || len(shape) != 2 || m.Embedded == 0 || shape[0] == m.Embedded {
			continue
		}
		r.bad("config.json", fmt.Sprintf("`vocab_size` is %d, but %s has embeddings for %d tokens", m.Embedded, tensor, shape[0]),
			"save the model again with `save_pretrained`, weights and config.json together")
		return
	}
}

// vocabulary is one past the highest id in a tokenizer.json, of the model (a map or a list) and the
// added tokens.
func vocabulary(tokenizer map[string]json.RawMessage) int64 {
	var model struct {
		Vocab json.RawMessage `json:"vocab"`
	}
	var added []struct {
		ID int64 `json:"id"`
	}
	_ = json.Unmarshal(tokenizer["model"], &model)
	_ = json.Unmarshal(tokenizer["added_tokens"], &added)
	size := int64(0)
	var byText map[string]int64
	var list []json.RawMessage
	if json.Unmarshal(model.Vocab, &byText) == nil {
		for _, id := range byText {
			size = max(size, id+1)
		}
	} else if json.Unmarshal(model.Vocab, &list) == nil {
		size = int64(len(list))
	}
	for _, token := range added {
		size = max(size, token.ID+1)
	}
	return size
}
