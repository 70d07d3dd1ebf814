package input

import (
	"encoding/json"
	"fmt"
	"slices"
)

// cacheless are models that workers can't sample from: engines decode step by step with a key and a value of one shape a token.
var cacheless = map[string]string{
	"bloom": "the distances of its tokens are biases of its attention", "rwkv": recurrent, "xlstm": recurrent,
	"mamba": recurrent, "mamba2": recurrent, "falcon_mamba": recurrent, "recurrent_gemma": recurrent, "jamba": recurrent,
	"bamba": recurrent, "zamba": recurrent, "zamba2": recurrent, "falcon_h1": recurrent, "nemotron_h": recurrent,
	"qwen3_next": recurrent, "deepseek_v2": latent, "deepseek_v3": latent,
}

const (
	recurrent = "it has recurrent layers"
	latent    = "it keeps latent vectors in place of keys and values"
)

// textConfig is what a model's config.json says of lengths. A part of another type than here counts as absent.
type textConfig struct {
	ModelType       string   `json:"model_type"`
	LayerTypes      []string `json:"layer_types"`
	Alibi           bool     `json:"alibi"`
	Original        int64    `json:"original_max_position_embeddings"`
	ChunkSize       int64    `json:"attention_chunk_size"`
	AttentionLayers []string `json:"attention_layers"`
	WindowSize      int64    `json:"window_size"`
	Scaling         rope     `json:"rope_scaling"`
	Parameters      rope     `json:"rope_parameters"`
}

// quantised names the method by which a model's weights were quantised; "" where they were not.
func quantised(config map[string]json.RawMessage) string {
	var found struct {
		Method string `json:"quant_method"`
	}
	if json.Unmarshal(config["quantization_config"], &found) == nil && found.Method != "" {
		return found.Method
	}
	return ""
}

type rope struct {
	Type     string `json:"rope_type"`
	Older    string `json:"type"`
	Original int64  `json:"original_max_position_embeddings"`
}

// reach reads how long sequences may be, as engines do (reach.py of the workers): what a probe of a few tokens doesn't show.
func (m *Model) reach(config map[string]json.RawMessage) {
	text := config
	var part map[string]json.RawMessage
	if json.Unmarshal(config["text_config"], &part) == nil && part != nil {
		text = part
	}
	whole, _ := json.Marshal(text)
	var c textConfig
	_ = json.Unmarshal(whole, &c)
	m.bound(number(text, "max_position_embeddings", "n_positions"), "the model has %d positions")
	if slices.Contains([]string{c.Scaling.Type, c.Scaling.Older, c.Parameters.Type}, "longrope") {
		for _, original := range []int64{c.Parameters.Original, c.Scaling.Original, c.Original} {
			m.bound(original, "the model turns the positions of sequences beyond %d tokens by their length (longrope)")
		}
	}
	if c.ChunkSize > 0 && (len(c.LayerTypes) == 0 || slices.Contains(c.LayerTypes, "chunked_attention")) {
		m.bound(c.ChunkSize, "the model attends within chunks of %d tokens, beyond which workers can't sample")
	}
	if slices.Contains(c.AttentionLayers, "local") {
		m.bound(c.WindowSize, "the model has layers that look back %d tokens, beyond which workers can't sample")
	}
	m.Quantised, m.Unsampled = quantised(config), cacheless[c.ModelType]
	if c.ModelType == "falcon" && c.Alibi {
		m.Unsampled = cacheless["bloom"]
	}
	for _, kind := range c.LayerTypes {
		if !slices.Contains([]string{"full_attention", "attention", "sliding_attention", "chunked_attention"}, kind) {
			m.Unsampled = "it has layers of " + kind
		}
	}
}

func (m *Model) bound(tokens int64, why string) {
	if tokens > 0 && (m.Context == 0 || tokens < m.Context) {
		m.Context, m.Bound = tokens, fmt.Sprintf(why, tokens)
	}
}
