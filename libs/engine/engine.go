// Package engine has the capabilities of the engines behind inference workers. capabilities.json is
// generated from the registry in python/rollout_workers/engines/registry.py by `make generate`.
package engine

import (
	_ "embed"
	"encoding/json"
	"slices"
)

// Capabilities are the capabilities of an engine that the planner checks.
type Capabilities struct {
	Attention      []string `json:"attention"`       // kinds of layers, as in `layer_types` of a model's config; empty: any
	LongRope       bool     `json:"long_rope"`       // decodes beyond the length from which positions depend on the length
	BeyondChunk    bool     `json:"beyond_chunk"`    // decodes beyond `attention_chunk_size`
	LocalAttention bool     `json:"local_attention"` // decodes beyond the `window_size` of GPT-Neo
	Greedy         bool     `json:"greedy"`          // temperature 0 takes the most likely token
	Deterministic  bool     `json:"deterministic"`   // can promise the same bits
	Verifies       []string `json:"verifies"`        // values of `weights.verify` that it supports
}

// Decodes reports whether the engine has layers of a kind.
func (c Capabilities) Decodes(kind string) bool {
	return len(c.Attention) == 0 || slices.Contains(c.Attention, kind)
}

//go:embed capabilities.json
var table []byte

// All reads the capabilities of every engine by its name in `engine.kind`.
func All() (map[string]Capabilities, error) {
	var all map[string]Capabilities
	err := json.Unmarshal(table, &all)
	return all, err
}
