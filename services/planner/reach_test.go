package planner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Models that engines can't decode are refused in the plan.
func TestPlanRefusesModelsThatTheEngineCannotDecode(t *testing.T) {
	t.Parallel()
	const phi = `"model_type": "phi3", "max_position_embeddings": 131072, `
	for config, want := range map[string]string{
		`{"model_type": "bloom"}`:                                                                           "the engine `transformers` can't decode model: it encodes positions as attention biases",
		`{"model_type": "falcon", "alibi": true}`:                                                           "it encodes positions as attention biases",
		`{"model_type": "falcon", "alibi": false}`:                                                          "",
		`{"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}`:                                 "it has layers of conv",
		`{"model_type": "granite", "layer_types": ["attention"]}`:                                           "",
		`{"quantization_config": {"quant_method": "mxfp4"}}`:                                                "the weights of model are quantized (mxfp4) and can't be trained",
		`{"quantization_config": null}`:                                                                     "",
		`{"model_type": "mamba"}`:                                                                           "it has recurrent layers",
		`{"model_type": "deepseek_v3"}`:                                                                     "it caches latent vectors",
		`{"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"]}`:                  "",
		`{` + phi + `"rope_scaling": {"type": "linear"}}`:                                                   "",
		`{` + phi + `"original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope"}}`:         "beyond 64 tokens (longrope)",
		`{` + phi + `"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}}`: "beyond 64 tokens (longrope)",
		`{"model_type": "llama4", "text_config": {"attention_chunk_size": 64}}`:                             "attends within chunks of 64 tokens",
		`{"attention_chunk_size": 64, "layer_types": ["full_attention"]}`:                                   "",
		`{"attention_layers": ["global", "local"], "window_size": 64}`:                                      "look back 64 tokens",
		`{"attention_layers": ["global"], "window_size": 64}`:                                               "",
		`{"text_config": {"max_position_embeddings": 64}}`:                                                  "the model has 64 positions",
	} {
		dir := project(t, "def exact(samples):\n    return [1.0 for s in samples]\n")
		if err := os.WriteFile(filepath.Join(dir, "model/config.json"), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		problems := create(t, server(t), dir, "engine.max_model_len=65").GetProblems()
		switch {
		case want == "" && len(problems) > 0:
			t.Errorf("%s: %v", config, problems)
		case want != "" && (len(problems) != 1 || !strings.Contains(problems[0].GetMessage(), want)):
			t.Errorf("%s: got %v, want %q", config, problems, want)
		}
	}
}
