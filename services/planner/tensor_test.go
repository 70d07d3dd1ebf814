package planner

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Names of tensors and layers, and a tokenizer that the model can't follow, are found before anything is loaded.
func TestPlanHoldsNamesAgainstTheModelsFiles(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, "def exact(samples):\n    return [0.0 for _ in samples]\n")
	header := `{"model.embed.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"model.layers.0.q_proj.weight":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`
	weights := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header+"01234567"...)
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("model/model.safetensors", string(weights))
	for set, want := range map[string]string{
		`train.freeze=["model.layers.[0-3].*"]`: "",
		`train.freeze=["model.layers.[!0].*"]`:  `"model.layers.[!0].*" matches no tensor`,
		`train.freeze=["model.layer.*"]`:        `"model.layer.*" matches no tensor`,
		`train.freeze=["model.layers.[0"]`:      "a bracket is not closed",
		`lora={rank=8, targets=["q_proj"]}`:     "",
		`lora={rank=8, targets=["v_proj"]}`:     `the model has no layer "v_proj"`,
		`lora={alpha=8.0}`:                      "`rank` is missing in [lora]",
		`lora={rank=8, dora="yes"}`:             "`lora.dora`",
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
	if len(response.GetProblems()) != 1 || !strings.Contains(response.GetProblems()[0].GetMessage(), "the tokenizer makes 4 tokens, the model embeds 3") {
		t.Errorf("a tokenizer of another model: %v", response.GetProblems())
	}
}
