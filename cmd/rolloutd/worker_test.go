package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/rollout-rl/rollout/libs/config"
)

// The interpreter of an environment is a symlink, and finds its packages by the symlink's folder.
func TestTheInterpreterOfTheWorkerCommand(t *testing.T) {
	t.Parallel()
	system, environment := filepath.Join(t.TempDir(), "python3"), t.TempDir()
	python, worker := filepath.Join(environment, "python"), filepath.Join(environment, "rollout-worker")
	for _, file := range []string{system, worker} {
		if err := os.WriteFile(file, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(system, python); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		worker config.Worker
		want   string
	}{
		"configured":             {config.Worker{Python: system, Command: []string{worker}}, system},
		"a program":              {config.Worker{Command: []string{worker}}, python},
		"a module":               {config.Worker{Command: []string{python, "-m", "rollout_testing.sim"}}, python},
		"an interpreter on PATH": {config.Worker{Command: []string{"python3.11", "-m", "rollout_testing.sim"}}, "python3.11"},
		"a program without a folder of an environment": {config.Worker{Command: []string{"/nowhere/rollout-worker"}}, "python3"},
	} {
		if got := pythonOf(c.worker); got != c.want {
			t.Errorf("%s: %s, not %s", name, got, c.want)
		}
	}
}
