package planner

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Names of tensors and layers, and a tokenizer that the model can't follow, are found before
// anything is loaded.
func TestPlanChecksNamesOfTensorsAndLayers(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, "def exact(samples):\n    return [0.0 for _ in samples]\n")
	header := `{"model.embed_tokens.weight":{"dtype":"I8","shape":[3,1],"data_offsets":[0,3]},
		"model.layers.0.q_proj.weight":{"dtype":"I8","shape":[1,1],"data_offsets":[3,4]},
		"model.layers.0.q_norm.weight":{"dtype":"I8","shape":[1],"data_offsets":[4,5]}}`
	weights := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header+"01234"...)
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("model/model.safetensors", string(weights))
	for set, want := range map[string]string{
		`train.freeze=["model.layers.[0-3].*"]`:       "",
		`train.freeze=["model.layers.[!0].*"]`:        `"model.layers.[!0].*" matches no tensor`,
		`train.freeze=["model.layer.*"]`:              `"model.layer.*" matches no tensor`,
		`train.freeze=["model.layers.[0"]`:            "a bracket is not closed",
		`lora={rank=8, targets=["q_proj"]}`:           "",
		`lora={rank=8, targets=["v_proj"]}`:           `the model has no layer "v_proj"`,
		`lora={rank=8, targets=["q_norm"]}`:           `the model has no layer "q_norm"`,
		`lora={rank=8, targets=["embed_tokens"]}`:     `the model has no layer "embed_tokens"`,
		`train.freeze=["model.embed*", "*.layers.*"]`: "matches every tensor of the model, so nothing is trained",
		`lora={alpha=8.0}`:                            "`rank` is missing in [lora]",
		`lora={rank=8, dora="yes"}`:                   "`lora.dora`",
	} {
		response := create(t, s, dir, "engine.max_model_len=16", set)
		if want == "" {
			if len(response.GetProblems()) > 0 {
				t.Errorf("%s: %v", set, response.GetProblems())
			}
			continue
		}
		if len(response.GetProblems()) == 0 || !strings.Contains(response.GetProblems()[0].GetMessage(), want) {
			t.Errorf("%s: got %v, want %q", set, response.GetProblems(), want)
		}
	}
	write("model/config.json", `{"n_positions": 32, "vocab_size": 3}`)
	response := create(t, s, dir)
	if len(response.GetProblems()) != 1 || !strings.Contains(response.GetProblems()[0].GetMessage(), "the tokenizer has 4 tokens, the model has embeddings for 3") {
		t.Errorf("a tokenizer of another model: %v", response.GetProblems())
	}
	write("model/config.json", `{"n_positions": 32, "vocab_size": 5}`)
	response = create(t, s, dir)
	if len(response.GetProblems()) != 1 || !strings.Contains(response.GetProblems()[0].GetMessage(), "`vocab_size` is 5, but model.embed_tokens.weight has embeddings for 3 tokens") {
		t.Errorf("embeddings of another size: %v", response.GetProblems())
	}
}
