package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	canonical "github.com/rollout-rl/rollout/libs/id"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// The error about changed inputs of a run or a snapshot names a command, and that command starts a
// new run.
func TestChangedInputs(t *testing.T) {
	t.Parallel()
	failed, done := &fake{state: runv1.RunState_RUN_STATE_FAILED}, &fake{state: runv1.RunState_RUN_STATE_SUCCEEDED}
	changed := &fake{state: runv1.RunState_RUN_STATE_FAILED, changed: true}
	id := snapshot().GetSnapshotId()
	forked := "RenewPlan addition-grpo in /home/me/addition\nCreateRun \"the new plan\\n\" key true from " + id
	set := strings.Replace(forked, " in ", " with train.steps=9 in ", 1)
	lock, err := canonical.CanonicalJSON(done.run(runv1.RunState_RUN_STATE_SUCCEEDED, 0).GetPlan())
	if err != nil {
		t.Fatal(err)
	}
	runCases(t, map[string]commandCase{
		"run-resume-done":    {args: "run --resume addition-grpo --detach", fake: done},
		"run-resume-changed": {args: "run --resume addition-grpo", fake: changed, asked: "ResumeRun " + runID},
		"run-resume-accept": {
			args: "run --resume addition-grpo --accept-changes --detach", fake: changed,
			asked: "ResumeRun " + runID + "\nListSnapshots \"" + runID + "\"\n" + forked,
		},
		"run-resume-same":      {args: "run --resume addition-grpo --accept-changes --detach", fake: failed, asked: "ResumeRun " + runID},
		"run-from-without":     {args: "run --resume addition-grpo --from addition-sft"},
		"run-continue-without": {args: "run --config a.toml --continue"},
		"run-from-plan":        {args: "run --plan plan.lock --from addition-sft"},
		"run-accept-without":   {args: "run --config a.toml --accept-changes"},
		"restore-changed":      {args: "snapshot restore snap-01kapq5 --detach", fake: changed, asked: "RestoreSnapshot " + id},
		"restore-accept": {
			args: "snapshot restore snap-01kapq5 --detach --accept-changes", fake: changed, asked: "RestoreSnapshot " + id + "\n" + forked,
		},
		"restore-set":         {args: "snapshot fork snap-01kapq5 --detach --set train.steps=9", fake: done, asked: "VerifyPlan " + string(lock) + "\n" + set},
		"restore-set-changed": {args: "snapshot fork snap-01kapq5 --detach --set train.steps=9", fake: changed, asked: "VerifyPlan " + string(lock)},
		"restore-set-accept":  {args: "snapshot fork snap-01kapq5 --detach --set train.steps=9 --accept-changes", fake: changed, asked: set},
		"export-without-to":   {args: "snapshot export snap-01kapq5"},
	})
}

func TestRunFromASnapshot(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "longer.toml"), "")
	for _, from := range []string{"addition-grpo", "snap-01kapq5"} {
		f := &fake{}
		got := call{plane: newPlane(t, f)}.run(t, "run", "--config", filepath.Join(dir, "longer.toml"), "--from", from, "--continue", "--detach")
		if got.code != 0 || !strings.HasSuffix(f.calls(), "from "+snapshot().GetSnapshotId()) {
			t.Errorf("from %s: asked %s; %s", from, f.calls(), got.text())
		}
	}
	got := call{plane: newPlane(t, &fake{})}.run(t, "run", "--config", filepath.Join(dir, "longer.toml"), "--from", "unknown")
	if got.code != 66 {
		t.Error(got.text())
	}
}

// Without --continue the weights of the snapshot are the model of a run that starts at step 0.
func TestRunWithTheWeightsOfASnapshot(t *testing.T) {
	t.Parallel()
	for _, from := range []string{"addition-grpo", "snap-01kapq5"} {
		dir := t.TempDir()
		write(t, filepath.Join(dir, "grpo.toml"), "")
		state := t.TempDir()
		folder := filepath.Join(state, "models", snapshot().GetSnapshotId())
		if err := os.MkdirAll(folder, 0o755); err != nil { // copied by an earlier run
			t.Fatal(err)
		}
		f := &fake{}
		got := call{plane: newPlane(t, f), env: map[string]string{"ROLLOUT_STATE_DIR": state}}.run(t, "run", "--config", filepath.Join(dir, "grpo.toml"), "--from", from, "--detach")
		if got.code != 0 || strings.Contains(f.calls(), " from snap-") || !strings.Contains(f.calls(), "CreateRun") ||
			!strings.Contains(f.calls(), "model.path=\""+folder+"\"") || !strings.Contains(got.stderr, "the run starts at step 0 with the weights of "+snapshot().GetSnapshotId()) {
			t.Errorf("from %s: asked %s; %s", from, f.calls(), got.text())
		}
	}
}
