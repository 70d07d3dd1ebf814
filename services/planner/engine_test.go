package planner

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/engine"
)

func TestPlanChecksTheCapabilitiesOfTheEngine(t *testing.T) {
	t.Parallel()
	s := server(t)
	if _, ok := s.engines["transformers"]; !ok {
		t.Fatalf("no transformers among %v", s.engines)
	}
	any := engine.Capabilities{LongRope: true, Greedy: true}
	for _, c := range []struct {
		name   string
		engine engine.Capabilities
		config string
		set    []string
		want   string
	}{
		{"any layers", any, `{"model_type": "mamba"}`, nil, ""},
		{"long positions", any, `{"original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope"}}`, []string{"engine.max_model_len=65"}, ""},
		{"bits by default", any, "", nil, ""},
		{"bits on request", any, "", []string{"deterministic=true"}, "the engine `transformers` does not give the same bits each time"},
		{"greedy evaluations", engine.Capabilities{}, "", []string{"eval.every_steps=1", `data.eval="train.jsonl"`}, "can't take the most likely token"},
	} {
		dir := project(t, "def exact(samples):\n    return [1.0 for s in samples]\n")
		if c.config != "" {
			if err := os.WriteFile(filepath.Join(dir, "model/config.json"), []byte(c.config), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s := server(t)
		s.engines = map[string]engine.Capabilities{"transformers": c.engine}
		response := create(t, s, dir, c.set...)
		if got := fmt.Sprint(response.GetProblems()); (len(response.GetProblems()) == 0) != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: got %s, want %q", c.name, got, c.want)
		}
		if response.GetPlan().GetConfig().GetDeterministic() {
			t.Errorf("%s: the plan promises bits that the engine does not", c.name)
		}
	}
}

func TestPlanAsksTheInterpreterOfTheEngine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, script string
		set          []string
		want         string
	}{
		{"no file", "", []string{"engine.python=absent/python"}, "the file absent/python does not exist"},
		{"no workers in it", "echo 'No module named rollout_workers' >&2; exit 1", nil, "can't describe the engine `vllm`: No module named rollout_workers"},
		{"no engine in it", `echo '{"capabilities": {}, "missing": "vllm"}'`, nil, "the engine `vllm` needs the package vllm, which"},
		{
			"its capabilities count", `echo '{"capabilities": {"greedy": false}, "missing": ""}'`, []string{"eval.every_steps=1", `data.eval="train.jsonl"`},
			"the engine `vllm` can't take the most likely token",
		},
		{"no promise of bits", `echo '{"capabilities": {"greedy": true}, "missing": ""}'`, []string{"deterministic=true"}, "the engine `vllm` does not give the same bits each time"},
		{"usable", `[ "$*" = "-m rollout_workers.engines.registry vllm" ] && echo '{"capabilities": {"greedy": true}, "missing": ""}'`, nil, ""},
	} {
		dir := project(t, "def exact(samples):\n    return [1.0 for s in samples]\n")
		if err := os.WriteFile(filepath.Join(dir, "python"), []byte("#!/bin/sh\n"+c.script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		response := create(t, server(t), dir, append([]string{"engine.kind=vllm", "engine.python=python"}, c.set...)...)
		if got := fmt.Sprint(response.GetProblems()); (len(response.GetProblems()) == 0) != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: got %s, want %q", c.name, got, c.want)
		}
	}
}
