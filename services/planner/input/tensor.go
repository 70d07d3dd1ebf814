package input

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
)

// Match reports whether a pattern (`model.layers.[0-3].*`, `[!...]` for all but those) fits the name of a tensor.
func (m *Model) Match(pattern string) (bool, error) {
	pattern = strings.ReplaceAll(pattern, "[!", "[^")
	for _, name := range m.Tensors {
		ok, err := path.Match(pattern, name)
		if ok || err != nil {
			return ok, err
		}
	}
	return false, nil
}

// HasLayer reports whether a layer of this name has a weight: `q_proj` for `model.layers.0.self_attn.q_proj.weight`.
func (m *Model) HasLayer(name string) bool {
	return slices.ContainsFunc(m.Tensors, func(tensor string) bool { return strings.HasSuffix(tensor, "."+name+".weight") })
}

// Layers are the names that HasLayer knows, sorted.
func (m *Model) Layers() []string {
	var names []string
	for _, tensor := range m.Tensors {
		layer, ok := strings.CutSuffix(tensor, ".weight")
		if ok && !strings.Contains(layer, "norm") {
			names = append(names, layer[strings.LastIndexByte(layer, '.')+1:])
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// embeddings holds the tokenizer against the model: a token without an embedding would end the run at its first row.
func (r *modelReader) embeddings() {
	m := r.model
	if m.Embedded == 0 || m.Vocabulary <= m.Embedded {
		return
	}
	r.bad("tokenizer.json", fmt.Sprintf("the tokenizer makes %d tokens, the model embeds %d: rollout does not resize embeddings", m.Vocabulary, m.Embedded),
		"use the model's own tokenizer, or call `model.resize_token_embeddings(len(tokenizer))` and save both first")
}

// vocabulary is one past the highest id in a tokenizer.json: of its model (by text, or a list), and of what was added.
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
