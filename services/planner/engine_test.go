package planner

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/engine"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
)

func TestPlanChecksTheCapabilitiesOfTheEngine(t *testing.T) {
	t.Parallel()
	s := server(t)
	if _, ok := s.engines["transformers"]; !ok {
		t.Fatalf("no transformers among %v", s.engines)
	}
	any := engine.Capabilities{LongRope: true, Greedy: true, Verifies: []string{"full", "none"}}
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
		{"sampled tensors", any, "", []string{`weights.verify="sampled"`}, "write one of full, none"},
		{"nothing read back", engine.Capabilities{Greedy: true, Verifies: []string{"none"}}, "", nil, "can't be read back like that"},
		{"nothing read back, as wanted", engine.Capabilities{Greedy: true, Verifies: []string{"none"}}, "", []string{`weights.verify="none"`}, ""},
		{"greedy evaluations", engine.Capabilities{Verifies: []string{"full"}}, "", []string{"eval.every_steps=1", `data.eval="train.jsonl"`}, "can't take the most likely token"},
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
		{"a server has it", `echo '{"capabilities": {"greedy": true, "verifies": ["full"]}, "missing": "vllm"}'`, []string{"engine.url=http://127.0.0.1:8000"}, ""},
		{"no engine in it", `echo '{"capabilities": {}, "missing": "vllm"}'`, nil, "the engine `vllm` needs the package vllm, which"},
		{
			"its capabilities count", `echo '{"capabilities": {"greedy": false, "verifies": ["full"]}, "missing": ""}'`, []string{"eval.every_steps=1", `data.eval="train.jsonl"`},
			"the engine `vllm` can't take the most likely token",
		},
		{"no promise of bits", `echo '{"capabilities": {"greedy": true, "verifies": ["full"]}, "missing": ""}'`, []string{"deterministic=true"}, "the engine `vllm` does not give the same bits each time"},
		{"usable", `[ "$*" = "-P -m rollout_workers.engines.registry vllm" ] && echo '{"capabilities": {"greedy": true, "verifies": ["full"]}, "missing": ""}'`, nil, ""},
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

// wrote is the keys of a configuration that has some.
type wrote struct {
	keys
	paths []string
}

func (w wrote) Wrote(path string) bool { return slices.Contains(w.paths, path) }

// TestWorkersVerifyRandomTensorsOfLargeModels uses a sparse file as the weights.
func TestWorkersVerifyRandomTensorsOfLargeModels(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		bytes   int64
		wrote   []string
		engines []string
		want    string
	}{
		{1 << 30, nil, []string{"full", "sampled"}, "full"},
		{3 << 30, nil, []string{"full", "sampled"}, "sampled"},
		{3 << 30, nil, []string{"full"}, "full"},
		{3 << 30, []string{"weights.verify"}, []string{"full", "sampled"}, "full"},
	} {
		folder := t.TempDir()
		if err := os.WriteFile(filepath.Join(folder, "model.safetensors"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(filepath.Join(folder, "model.safetensors"), c.bytes); err != nil {
			t.Fatal(err)
		}
		d := &modelCheck{
			config:   &configv1.RunConfig{Weights: &configv1.WeightsConfig{Verify: proto.String("full")}, Engine: &configv1.EngineConfig{Kind: proto.String("e")}},
			findings: findings{keys: wrote{paths: c.wrote}}, engines: map[string]engine.Capabilities{"e": {Verifies: c.engines}},
		}
		d.fitVerification(folder, &input.Model{Files: []string{"model.safetensors"}})
		if got := d.config.GetWeights().GetVerify(); got != c.want {
			t.Errorf("%+v: %s, want %s", c, got, c.want)
		}
	}
}
