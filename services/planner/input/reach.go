package input

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/rollout-rl/rollout/libs/engine"
)

// Kinds of layers beyond those that configs name in `layer_types`.
const (
	alibi     = "alibi"
	recurrent = "recurrent"
	latent    = "latent"
)

// layersOf are the kinds of layers of model types whose config does not name them.
var layersOf = map[string]string{
	"bloom": alibi, "rwkv": recurrent, "xlstm": recurrent,
	"mamba": recurrent, "mamba2": recurrent, "falcon_mamba": recurrent, "recurrent_gemma": recurrent, "jamba": recurrent,
	"bamba": recurrent, "zamba": recurrent, "zamba2": recurrent, "falcon_h1": recurrent, "nemotron_h": recurrent,
	"qwen3_next": recurrent, "deepseek_v2": latent, "deepseek_v3": latent,
}

// described says what a model with layers of a kind is like.
var described = map[string]string{
	alibi:     "it encodes positions as attention biases (ALiBi)",
	recurrent: "it has recurrent layers",
	latent:    "it caches latent vectors instead of keys and values",
}

// limit is a length beyond which an engine needs a capability; one without any holds for all.
type limit struct {
	tokens int64
	why    string
	lifted func(engine.Capabilities) bool
}

// textConfig is what the config.json of a model says about lengths. A part of an unexpected type
// counts as absent.
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

type rope struct {
	Type     string `json:"rope_type"`
	Older    string `json:"type"`
	Original int64  `json:"original_max_position_embeddings"`
}

// quantized names the method by which the weights of a model were quantized; "" if they were not.
func quantized(config map[string]json.RawMessage) string {
	var found struct {
		Method string `json:"quant_method"`
	}
	if json.Unmarshal(config["quantization_config"], &found) == nil {
		return found.Method
	}
	return ""
}

// reach reads the kinds of layers and the limits of the length from the config of a model.
func (m *Model) reach(config map[string]json.RawMessage) {
	text := config
	var part map[string]json.RawMessage
	if json.Unmarshal(config["text_config"], &part) == nil && part != nil {
		text = part
	}
	whole, _ := json.Marshal(text)
	var c textConfig
	_ = json.Unmarshal(whole, &c)
	m.limit(number(text, "max_position_embeddings", "n_positions"), "the model has %d positions", nil)
	if slices.Contains([]string{c.Scaling.Type, c.Scaling.Older, c.Parameters.Type}, "longrope") {
		for _, original := range []int64{c.Parameters.Original, c.Scaling.Original, c.Original} {
			m.limit(original, "the model scales the positions of sequences beyond %d tokens (longrope)",
				func(e engine.Capabilities) bool { return e.LongRope })
		}
	}
	if c.ChunkSize > 0 && (len(c.LayerTypes) == 0 || slices.Contains(c.LayerTypes, "chunked_attention")) {
		m.limit(c.ChunkSize, "the model attends within chunks of %d tokens, beyond which the engine can't sample",
			func(e engine.Capabilities) bool { return e.BeyondChunk })
	}
	if slices.Contains(c.AttentionLayers, "local") {
		m.limit(c.WindowSize, "the model has layers that look back %d tokens, beyond which the engine can't sample",
			func(e engine.Capabilities) bool { return e.LocalAttention })
	}
	m.Quantized = quantized(config)
	m.attention = slices.Clone(c.LayerTypes)
	if kind := layersOf[c.ModelType]; kind != "" {
		m.attention = append(m.attention, kind)
	}
	if c.ModelType == "falcon" && c.Alibi {
		m.attention = append(m.attention, alibi)
	}
}

func (m *Model) limit(tokens int64, why string, lifted func(engine.Capabilities) bool) {
	if tokens > 0 {
		m.limits = append(m.limits, limit{tokens, fmt.Sprintf(why, tokens), lifted})
	}
}

// Context is the longest sequence that the model and an engine allow together, and the reason; 0 if
// nothing limits it.
func (m *Model) Context(e engine.Capabilities) (tokens int64, why string) {
	for _, l := range m.limits {
		if (tokens == 0 || l.tokens < tokens) && (l.lifted == nil || !l.lifted(e)) {
			tokens, why = l.tokens, l.why
		}
	}
	return tokens, why
}

// Undecodable says why an engine cannot decode the model; "" if it can.
func (m *Model) Undecodable(e engine.Capabilities) string {
	for _, kind := range m.attention {
		if kind == "attention" { // an older name
			kind = "full_attention"
		}
		if e.Decodes(kind) {
			continue
		}
		if text := described[kind]; text != "" {
			return text
		}
		return "it has layers of " + kind
	}
	return ""
}
