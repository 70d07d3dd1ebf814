package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// chatModel makes the folder of a model with a context of 2,048 tokens, a chat template, and a
// token for each byte.
func chatModel(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(project(t), "model")
	write(t, filepath.Join(dir, "config.json"), `{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 2048, "vocab_size": 260}`)
	vocabulary, next := map[string]int{"<pad>": 0, "<eos>": 1}, rune(256)
	for b := range rune(256) { // the printable form of each byte, as in GPT-2
		shown := b
		if b < '!' || b > '~' && b < '¡' || b == 0xAD {
			shown = next
			next++
		}
		vocabulary[string(shown)] = len(vocabulary)
	}
	special := func(id int, text string) map[string]any {
		return map[string]any{"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}
	}
	tokenizer, err := json.Marshal(map[string]any{
		"version": "1.0", "added_tokens": []any{special(0, "<pad>"), special(1, "<eos>")},
		"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
		"decoder":       map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
		"model":         map[string]any{"type": "BPE", "vocab": vocabulary, "merges": []string{}},
	})
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "tokenizer.json"), string(tokenizer))
	write(t, filepath.Join(dir, "chat_template.jinja"),
		"{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
	return dir
}

// Each recipe passes `rollout plan` as it was written, without a warning.
func TestInitPassesThePlan(t *testing.T) {
	t.Parallel()
	plane, model := realPlanner(t), chatModel(t)
	for _, recipe := range []string{"grpo-math", "sft-chat", "dpo", "rm", "agent"} {
		t.Run(recipe, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "new")
			got := execute(t, plane, "init", dir, "--recipe", recipe, "--model", model)
			golden(t, "testdata/init/"+recipe+".txt", strings.ReplaceAll(strings.ReplaceAll(got.text(), dir, "DIR"), model, "MODEL"))
			config := filepath.Join(dir, "run.toml")
			golden(t, "testdata/init/"+recipe+".toml", strings.ReplaceAll(read(t, config), model, "MODEL"))
			planned := execute(t, plane, "plan", "--config", config)
			if planned.code != 0 || planned.stderr != "" || !strings.Contains(planned.stdout, "next: rollout run --plan") {
				t.Error(planned.text())
			}
		})
	}
}

// A recipe for plain text takes a model without a chat template, and a small context.
func TestInitFitsTheModel(t *testing.T) {
	t.Parallel()
	model, dir := chatModel(t), t.TempDir()
	if err := os.Remove(filepath.Join(model, "chat_template.jinja")); err != nil {
		t.Fatal(err)
	}
	config := strings.Replace(read(t, filepath.Join(model, "config.json")), "2048", "300", 1)
	write(t, filepath.Join(model, "config.json"), config)
	if got := execute(t, nil, "init", dir, "--recipe", "grpo-math", "--model", model); got.code != 0 {
		t.Fatal(got.text())
	}
	text := read(t, filepath.Join(dir, "run.toml"))
	for _, want := range []string{"chat_template = false", "max_model_len = 300 ", "max_tokens = 150 "} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is missing in\n%s", want, text)
		}
	}
	if got := execute(t, nil, "init", t.TempDir(), "--recipe", "sft-chat", "--model", model); got.code != 65 ||
		!strings.Contains(got.stderr, "needs a chat template") {
		t.Error(got.text())
	}
}

func TestInitRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	got := execute(t, nil, "init", dir, "--recipe", "dpo")
	if got.code != 0 || !strings.Contains(got.stdout, "set model.path in "+filepath.Join(dir, "run.toml")) {
		t.Fatal(got.text())
	}
	if text := read(t, filepath.Join(dir, "run.toml")); !strings.Contains(text, "# FILL IN: the folder of a model in the Hugging Face layout, or its name on the hub (owner/name).\npath = \"FILL-IN\"\n") {
		t.Error(text)
	}
	write(t, filepath.Join(dir, "run.toml"), "mine")
	for text, args := range map[string][]string{
		"run.toml already exists":             {dir, "--recipe", "dpo"},
		"did you mean `grpo-math`":            {dir, "--recipe", "grpo-maths"},
		`required flag(s) "recipe" not set`:   {dir},
		"no-such-model is not a folder":       {dir, "--recipe", "dpo", "--model", "no-such-model"},
		"cannot read config.json":             {dir, "--recipe", "dpo", "--model", t.TempDir()},
		"cannot write /proc/nowhere/run.toml": {"/proc/nowhere", "--recipe", "dpo"},
	} {
		if got := execute(t, nil, append([]string{"init"}, args...)...); got.code == 0 || !strings.Contains(got.stderr, text) {
			t.Errorf("%s: %s", text, got.text())
		}
	}
	if read(t, filepath.Join(dir, "run.toml")) != "mine" {
		t.Error("a file was replaced without --force")
	}
	got = execute(t, nil, "init", dir, "--recipe", "dpo", "--force", "--model", "Qwen/Qwen3-0.6B", "--format", "json")
	if text := read(t, filepath.Join(dir, "run.toml")); got.code != 0 || !strings.Contains(text, `path = "Qwen/Qwen3-0.6B"`) || !strings.Contains(got.stdout, `"recipe": "dpo"`) {
		t.Errorf("%s\n%s", got.text(), text)
	}
}
