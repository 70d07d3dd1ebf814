package planner

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

const constant = "def exact(samples):\n    return [1.0] * len(samples)\n"

// planOf plans a configuration for a folder with a number of training rows.
func planOf(t *testing.T, s *Server, dir, text string, rows int, set ...string) *planv1.CreatePlanResponse {
	t.Helper()
	var lines strings.Builder
	for range rows {
		lines.WriteString("{\"prompt\": \"1+1=\", \"answer\": \"1\"}\n")
	}
	if err := os.WriteFile(filepath.Join(dir, "train.jsonl"), []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	response, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{
		Toml: []byte(text), File: "run.toml", BaseDir: dir, Set: set,
	}})
	if err != nil {
		t.Fatal(err)
	}
	return response
}

func TestEpochsBecomeSteps(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, constant)
	text := strings.Replace(configText, "steps = 4\n", "groups_per_step = 32\n", 1)
	sft := strings.Replace(strings.Replace(text, "[algorithm.grpo]", "[algorithm.sft]", 1), "group_size = 2\n", "", 1)
	for _, c := range []struct {
		text   string
		rows   int
		epochs string
		steps  uint64
	}{
		{text, 64, "1", 2},
		{text, 64, "3", 6},
		{text, 64, "0.5", 1},
		{text, 65, "1", 3},
		{text, 1, "1", 1},
		{text, 30, "0.1", 1},
		{sft, 100, "2", 7},
	} {
		response := planOf(t, s, dir, c.text, c.rows, "train.epochs="+c.epochs)
		if got := response.GetPlan().GetConfig().GetTrain(); got.GetSteps() != c.steps {
			t.Errorf("%s epochs of %d rows: %v %v", c.epochs, c.rows, got, response.GetProblems())
		}
	}
	for set, want := range map[string]string{
		"train.warmup_steps=7":    "CONFLICT train.warmup_steps: `train.warmup_steps` is 7, and 3 epochs of 64 rows are only 6 steps of 32: lower `warmup_steps`, or raise `epochs`",
		"train.groups_per_step=0": "",
	} {
		problems := planOf(t, s, dir, text, 64, "train.epochs=3", set).GetProblems()
		if want == "" {
			if len(problems) != 1 || problems[0].GetField() != "train.groups_per_step" {
				t.Errorf("%s: %v", set, problems)
			}
			continue
		}
		if len(problems) != 1 || fmt.Sprintf("%s %s: %s: %s", problems[0].GetReason(), problems[0].GetField(), problems[0].GetMessage(), problems[0].GetFix()) != want {
			t.Errorf("%s: %v", set, problems)
		}
	}
	if p := planOf(t, s, dir, text, 64, "train.epochs=100000", "train.groups_per_step=1").GetPlan().GetConfig().GetTrain(); p.GetSteps() != 6_400_000 {
		t.Errorf("%v", p)
	}
}

// A plan in epochs that is made again for other data has other steps.
func TestARenewedPlanCountsTheRowsAgain(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, constant)
	text := strings.Replace(configText, "steps = 4\n", "groups_per_step = 2\nepochs = 2\n", 1)
	first := planOf(t, s, dir, text, 4).GetPlan()
	if first.GetConfig().GetTrain().GetSteps() != 4 {
		t.Fatal(first)
	}
	planOf(t, s, dir, text, 6) // writes the rows
	renewed, err := s.RenewPlan(t.Context(), &planv1.RenewPlanRequest{Plan: first, BaseDir: dir})
	if err != nil || renewed.GetPlan().GetConfig().GetTrain().GetSteps() != 6 || renewed.GetPlan().GetConfig().GetTrain().GetEpochs() != 2 {
		t.Errorf("%v, %v", renewed, err)
	}
	if !proto.Equal(first.GetConfig().GetModel(), renewed.GetPlan().GetConfig().GetModel()) {
		t.Error("another model")
	}
}

// The settings of a plan state steps and epochs, and where each value comes from.
func TestAPlanListsItsSettings(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, constant)
	list := func(text string, set ...string) string {
		response := planOf(t, s, dir, text, 64, set...)
		if response.GetPlan() == nil {
			t.Fatal(response.GetProblems())
		}
		var lines []string
		for _, setting := range response.GetSettings() {
			origin := strings.ToLower(strings.TrimPrefix(setting.GetOrigin().String(), "SETTING_ORIGIN_"))
			lines = append(lines, strings.TrimSpace(fmt.Sprintf("%s %s %s %s", setting.GetKey(), setting.GetValue(), origin, setting.GetNote())))
		}
		return strings.Join(lines, "\n")
	}
	if got, want := list(configText, "train.groups_per_step=24"), `train.epochs 1.5 computed 64 rows, 24 per step
train.steps 4 set
train.groups_per_step 24 set
sampling.group_size 2 set 48 samples per step
algorithm.grpo.minibatches 1 default
algorithm.grpo.epochs 1 default
train.learning_rate 1e-6 default
train.schedule "constant" default
algorithm.grpo.kl_coefficient 0 default
lora  default all weights are trained
model.dtype "float32" default
engine.max_model_len 32 default
sampling.max_tokens 6 set
sampling.temperature 1 default
sampling.top_p 1 default`; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	sft := strings.Replace(strings.Replace(configText, "[algorithm.grpo]", "[algorithm.sft]", 1), "group_size = 2\n", "", 1)
	sft = strings.Replace(sft, "steps = 4\n", "epochs = 3\n", 1)
	if got, want := list(sft, "lora.rank=4", "train.schedule=cosine", "train.warmup_steps=2", `data.eval="train.jsonl"`, "eval.every_steps=3"), `train.epochs 3 set 64 rows, 32 per step
train.steps 6 computed
train.groups_per_step 32 default
train.learning_rate 2e-4 default
train.schedule "cosine" set
train.warmup_steps 2 set
lora.rank 4 set
lora.alpha 32 default
lora.targets [] default all linear layers except the head
model.dtype "float32" default
engine.max_model_len 32 default
sampling.max_tokens 6 set
eval.temperature 0 default`; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
