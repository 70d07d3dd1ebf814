package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// worker is a command that copies its spec to kept, prints an answer, and exits with a code.
func worker(t *testing.T, answer string, code string) (command, kept string) {
	t.Helper()
	dir := t.TempDir()
	command, kept = filepath.Join(dir, "worker"), filepath.Join(dir, "spec")
	text := "#!/bin/sh\ncp \"$3\" " + kept + "\ncat <<'END'\n" + answer + "\nEND\necho its last words >&2\nexit " + code + "\n"
	if err := os.WriteFile(command, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	return command, kept
}

func TestExportMetrics(t *testing.T) {
	t.Parallel()
	f := &fake{history: keptStory(), state: runv1.RunState_RUN_STATE_SUCCEEDED, directory: "/runs/1"}
	command1, spec := worker(t, "a library prints\n"+`{"sink": "tensorboard", "where": "/tb", "written": 12, "known": 3, "failures": 0, "error": "", "done": true}`, "0")
	got := call{plane: newPlane(t, f)}.run(t, "export", "metrics", "addition-grpo", "--server", "here", "--to", "tensorboard", "--directory", "/tb", "--worker", command1)
	golden(t, "testdata/command/export-metrics.txt", got.text())
	lines := strings.Split(strings.TrimSpace(read(t, spec)), "\n")
	if want := 1 + 3 + 2 + 2 + 3; len(lines) != want { // head, steps, evaluations, states, completions
		t.Errorf("%d lines:\n%s", len(lines), strings.Join(lines, "\n"))
	}
	for _, wanted := range []string{`"run_id":"` + runID, `"directory":"/runs/1"`, `"sinks":{"tensorboard":{"directory":"/tb"}}`} {
		if !strings.Contains(strings.ReplaceAll(lines[0], ": ", ":"), wanted) {
			t.Errorf("%s is not in %s", wanted, lines[0])
		}
	}
	failing, _ := worker(t, `{"sink":"mlflow","where":"","written":0,"known":0,"failures":2,"error":"ConnectionError: refused","done":false}`, "65")
	got = call{plane: newPlane(t, f)}.run(t, "export", "metrics", "addition-grpo", "--server", "here", "--to", "mlflow", "--worker", failing)
	golden(t, "testdata/command/export-metrics-failed.txt", got.text())
	silent, _ := worker(t, "", "1")
	got = call{plane: newPlane(t, f)}.run(t, "export", "metrics", "addition-grpo", "--server", "here", "--to", "wandb", "--worker", silent)
	if got.code != 70 || !strings.Contains(got.stderr, "its last words") {
		t.Error(got.text())
	}
	for name, args := range map[string]string{"export-no-sinks": "", "export-bad-sink": "--to tensorbord"} {
		got = call{plane: newPlane(t, f)}.run(t, append([]string{"export", "metrics", "addition-grpo", "--server", "here"}, strings.Fields(args)...)...)
		golden(t, "testdata/command/"+name+".txt", got.text())
	}
}
