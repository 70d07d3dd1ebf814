package planner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// A prompt with text outside of the vocabulary is a warning, not a problem.
func TestUnknownTokensInPromptsAreAWarning(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, "def exact(samples):\n    return [1.0] * len(samples)\n")
	if got := create(t, s, dir, "train.groups_per_step=1"); len(got.GetWarnings()) != 0 || got.GetPlan() == nil {
		t.Fatalf("%v", got)
	}
	rows := `{"prompt": "1+1="}` + "\n" + `{"prompt": "1+é="}` + "\n" + `{"prompt": "1+x="}` + "\n"
	if err := os.WriteFile(filepath.Join(dir, "train.jsonl"), []byte(rows), 0o644); err != nil {
		t.Fatal(err)
	}
	got := create(t, s, dir, "train.groups_per_step=1")
	if got.GetPlan() == nil || len(got.GetProblems()) != 0 || len(got.GetWarnings()) != 1 {
		t.Fatalf("%v", got)
	}
	w := got.GetWarnings()[0]
	if w.GetFile() != "train.jsonl" || w.GetLine() != 2 || !strings.Contains(w.GetMessage(), `"é"`) || !strings.Contains(w.GetMessage(), "2 rows") {
		t.Errorf("%v", w)
	}
}

// Text outside of the vocabulary in a training target is a warning too.
func TestUnknownTokensInCompletionsAreAWarning(t *testing.T) {
	t.Parallel()
	s := server(t)
	for _, c := range []struct{ algorithm, row, field string }{
		{"sft", `{"prompt": "1+1=", "answer": "é"}`, "answer"},
		{"dpo", `{"prompt": "1+1=", "chosen": "1", "rejected": "é"}`, "rejected"},
		{"kto", `{"prompt": "1+1=", "completion": "1é", "label": true}` + "\n" + `{"prompt": "1+1=", "completion": "1", "label": false}`, "completion"},
	} {
		dir := project(t, "")
		if err := os.WriteFile(filepath.Join(dir, "train.jsonl"), []byte(c.row+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		text := "name = \"x\"\n[model]\npath = \"model\"\n[data]\ntrain = \"train.jsonl\"\n[train]\nsteps = 1\ngroups_per_step = 1\n[algorithm." + c.algorithm + "]\n"
		got, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{Toml: []byte(text), File: "run.toml", BaseDir: dir}})
		if err != nil || got.GetPlan() == nil || len(got.GetWarnings()) != 1 {
			t.Errorf("%s: %v %v", c.algorithm, got, err)
			continue
		}
		w := got.GetWarnings()[0]
		want := "the vocabulary does not contain \"é\" in `" + c.field + "`: the model learns to generate its unknown token"
		if w.GetFile() != "train.jsonl" || w.GetLine() != 1 || w.GetMessage() != want {
			t.Errorf("%s: %v", c.algorithm, w)
		}
	}
}

// KTO needs both labels, so equal labels are a warning.
func TestEqualLabelsAreAWarning(t *testing.T) {
	t.Parallel()
	s := server(t)
	for _, c := range []struct{ rows, want string }{
		{"true true", "every completion is desirable (true) and none is undesirable (false), but KTO needs both"},
		{"false false", "every completion is undesirable (false) and none is desirable (true), but KTO needs both"},
		{"true false", ""},
	} {
		dir, rows := project(t, ""), ""
		for i, label := range strings.Fields(c.rows) {
			rows += `{"prompt": "1+1=", "completion": "` + strings.Repeat("1", i+1) + `", "label": ` + label + "}\n"
		}
		if err := os.WriteFile(filepath.Join(dir, "train.jsonl"), []byte(rows), 0o600); err != nil {
			t.Fatal(err)
		}
		text := "name = \"x\"\n[model]\npath = \"model\"\n[data]\ntrain = \"train.jsonl\"\n[train]\nsteps = 1\ngroups_per_step = 1\n[algorithm.kto]\n"
		got, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{Toml: []byte(text), File: "run.toml", BaseDir: dir}})
		var said []string
		for _, w := range got.GetWarnings() {
			said = append(said, w.GetMessage())
		}
		if err != nil || got.GetPlan() == nil || strings.Join(said, "; ") != c.want {
			t.Errorf("%s: %q %v %v", c.rows, said, got.GetProblems(), err)
		}
	}
}

// Evaluations on training rows measure memorization.
func TestHeldOutRowsEqualToTrainingRowsAreAWarning(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, "def exact(samples):\n    return [1.0] * len(samples)\n")
	rows, err := os.ReadFile(filepath.Join(dir, "train.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		rows string
		want string
	}{
		{string(rows), "eval.jsonl has the same rows as `data.train`"},
		{`{"prompt": "11+1=", "answer": "2"}` + "\n" + string(rows), "1 of the 2 held-out rows repeat the prompt of a training row; the first is row 2"},
		{`{"prompt": "11+1=", "answer": "2"}` + "\n", ""},
	} {
		if err := os.WriteFile(filepath.Join(dir, "eval.jsonl"), []byte(c.rows), 0o600); err != nil {
			t.Fatal(err)
		}
		got := create(t, s, dir, `data.eval="eval.jsonl"`, "eval.every_steps=1", "train.groups_per_step=1")
		if got.GetPlan() == nil || len(got.GetWarnings()) != min(1, len(c.want)) {
			t.Fatalf("%v", got)
		}
		for _, w := range got.GetWarnings() {
			if !strings.Contains(w.GetMessage(), c.want) {
				t.Errorf("%v", w)
			}
		}
	}
}
