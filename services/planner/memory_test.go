package planner

import (
	"context"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// shaped is the config.json of a model with layers, whose one tensor has 4 bytes.
const shaped = `{"architectures":["LlamaForCausalLM"],"vocab_size":9,"hidden_size":8,"num_hidden_layers":2,"num_attention_heads":2,"intermediate_size":16}`

func TestARunThatExceedsTheMemoryOfTheHostIsRefused(t *testing.T) {
	t.Parallel()
	cfg := prober(t)
	host := Host{Memory: 10}
	cfg.Host = func(context.Context) Host { return host }
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	dir := project(t, constant)
	write(t, dir, map[string]string{"model/config.json": shaped})
	response := planOf(t, s, dir, configText, 8)
	problems := response.GetProblems()
	if len(problems) != 1 || response.GetPlan() != nil {
		t.Fatalf("%v", response)
	}
	p := problems[0]
	const want = "the host has 10 B of memory, and the processes of the run hold 20 B before the first step: 1 x learner 16 B, 1 x inference 4 B"
	if p.GetReason() != "TOO_LARGE" || p.GetField() != "model.path" || p.GetLine() == 0 || p.GetMessage() != want ||
		!strings.HasPrefix(p.GetFix(), "choose train adapters (`[lora]`), or `model.dtype = \"bfloat16\"`, or `train.optimizer = \"adamw_8bit\"`, or a smaller model; ") {
		t.Errorf("%v", p)
	}
	if report := response.GetMemory(); report.GetHeldBytes() != 20 || report.GetHostBytes() != 10 || len(report.GetMisfits()) != 1 {
		t.Errorf("%v", report)
	}
	host.Memory = 20
	if response := planOf(t, s, dir, configText, 8); response.GetPlan() == nil || response.GetMemory().GetHostBytes() != 20 {
		t.Errorf("it fits: %v", response)
	}
	host.Memory = 10
	assumed, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{
		Source: &planv1.ConfigSource{Toml: []byte(configText), File: "run.toml", BaseDir: dir}, Host: &planv1.AssumedHost{GpuBytes: []uint64{8}},
	})
	if err != nil || assumed.GetPlan() == nil || len(assumed.GetMemory().GetMisfits()) != 1 {
		t.Errorf("an assumed host: %v %v", assumed, err)
	}
}

func TestAModelWithoutAShapeHasNoReport(t *testing.T) {
	t.Parallel()
	cfg := prober(t)
	cfg.Host = func(context.Context) Host { return Host{Memory: 1} }
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	response := planOf(t, s, project(t, constant), configText, 8)
	if response.GetPlan() == nil || response.GetMemory() != nil {
		t.Errorf("%v", response)
	}
}
