package planner

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// Rows and rewards of the suites of a run are checked and pinned like its own.
func TestSuitesOfARunArePinned(t *testing.T) {
	t.Parallel()
	dir := project(t, "def exact(samples): return [float(s.completion == '2') for s in samples]\n")
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("sums.jsonl", `{"prompt": "1+1=", "answer": "2", "page": 1}`+"\n")
	write("judge.py", "def right(samples): return [float(s.completion == s.row['answer']) for s in samples]\n")
	s := server(t)
	suites := []string{
		"eval.every_steps=2", "eval.suites.sums.data=\"sums.jsonl\"", "eval.suites.sums.cluster=\"page\"", "eval.suites.again.data=\"sums.jsonl\"",
		"eval.suites.again.reward={plugin=\"judge.py:right\"}",
	}
	made := create(t, s, dir, suites...)
	if len(made.GetProblems()) > 0 {
		t.Fatal(made.GetProblems())
	}
	var found []string
	for _, in := range made.GetPlan().GetInputs() {
		if in.GetRole() == planv1.InputRole_INPUT_ROLE_SUITE_DATA || in.GetRole() == planv1.InputRole_INPUT_ROLE_REWARD {
			found = append(found, in.GetPath())
		}
	}
	if want := []string{"judge.py", "reward.py", "sums.jsonl"}; !slices.Equal(found, want) {
		t.Errorf("pinned %q, want %q", found, want)
	}
	for _, c := range []struct{ set, file, text, want string }{
		{"eval.suites.sums.data=\"none.jsonl\"", "", "", "eval.suites.sums.data"},
		{"eval.suites.sums.cluster=\"chapter\"", "", "", "row 1 of sums.jsonl has no field `chapter`"},
		{"seed=1", "judge.py", "def right(samples): return [s.row['missing'] for s in samples]\n", "KeyError: 'missing'"},
		{"seed=1", "sums.jsonl", "{\"question\": 1}\n", "sums.jsonl"},
	} {
		if c.file != "" {
			write(c.file, c.text)
		}
		made := create(t, s, dir, append(slices.Clone(suites), c.set)...)
		var texts []string
		for _, p := range made.GetProblems() {
			texts = append(texts, p.GetFile()+" "+p.GetField()+" "+p.GetMessage())
		}
		if text := strings.Join(texts, "\n"); !strings.Contains(text, c.want) {
			t.Errorf("%s: got %q, want %q", c.set, text, c.want)
		}
	}
}
