package planner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

func TestTheTeacherIsReadAndPinned(t *testing.T) {
	t.Parallel()
	s, dir := server(t), project(t, "def exact(samples): return [1.0 for _ in samples]\n")
	teacher := filepath.Join(dir, "teacher")
	ask := func() *planv1.CreatePlanResponse {
		text := strings.Replace(configText, "[algorithm.grpo]", "[algorithm.distillation]\nteacher = \"teacher\"", 1)
		response, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{Toml: []byte(text), File: "run.toml", BaseDir: dir}})
		if err != nil {
			t.Fatal(err)
		}
		return response
	}
	told := func(reason string) {
		t.Helper()
		if p := ask().GetProblems(); len(p) != 1 || p[0].GetReason() != reason || p[0].GetField() != "algorithm.distillation.teacher" || p[0].GetLine() == 0 {
			t.Errorf("want %s, got %v", reason, p)
		}
	}
	told("MISSING_FILE")
	if err := os.CopyFS(teacher, os.DirFS(filepath.Join(dir, "model"))); err != nil {
		t.Fatal(err)
	}
	pinned := 0
	for _, in := range ask().GetPlan().GetInputs() {
		if strings.HasPrefix(in.GetPath(), "teacher/") && in.GetRole() == planv1.InputRole_INPUT_ROLE_MODEL {
			pinned++
		}
	}
	if pinned != 3 {
		t.Errorf("%d files of the teacher are pinned", pinned)
	}
	for folder, size := range map[string]string{"model": "4", "teacher": "5"} {
		if err := os.WriteFile(filepath.Join(dir, folder, "config.json"), []byte(`{"n_positions": 32, "vocab_size": `+size+`}`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	told("BAD_MODEL")
}
