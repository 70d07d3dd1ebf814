package planner

import (
	"strings"
	"testing"
)

func TestElsewhereSuggestsWhatAPathMeans(t *testing.T) {
	t.Setenv("HOME", "/home/me")
	for path, want := range map[string]string{
		"https://huggingface.co/datasets/openai/gsm8k":     `"openai/gsm8k"`,
		"https://huggingface.co/Qwen/Qwen3-0.6B/tree/main": `"Qwen/Qwen3-0.6B"`,
		"hf.co/openai-community/gpt2":                      `"openai-community/gpt2"`,
		"~/rows.jsonl":                                     "`~` is not expanded: write \"/home/me/rows.jsonl\"",
		"data/rows.jsonl":                                  "",
	} {
		if got := elsewhere(path); !strings.HasSuffix(got, want) || want == "" && got != "" {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}
