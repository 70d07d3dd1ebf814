package main

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
	schedulerstore "github.com/rollout-rl/rollout/services/scheduler/sqlstore"
	snapshotstore "github.com/rollout-rl/rollout/services/snapshot/sqlstore"
	storagestore "github.com/rollout-rl/rollout/services/storage/sqlstore"
)

func TestCompletions(t *testing.T) {
	t.Parallel()
	for name, args := range map[string]string{
		"completions": "", "completions-step": "--step 1", "completions-all-json": "--all --format json", "completions-no-step": "--step 2", "completions-both": "--step 1 --all",
		"completions-tokens": "--group 7 --sample 2 --tokens", "completions-no-sample": "--group 7 --sample 3",
	} {
		f := &fake{history: keptStory(), state: runv1.RunState_RUN_STATE_SUCCEEDED}
		got := call{plane: newPlane(t, f)}.run(t, append([]string{"completions", "addition-grpo", "--server", "here"}, strings.Fields(args)...)...)
		golden(t, "testdata/command/"+name+".txt", got.text())
	}
	got := call{plane: newPlane(t, &fake{history: story(), state: runv1.RunState_RUN_STATE_SUCCEEDED})}.run(t, "completions", "addition-grpo", "--server", "here")
	if got.code != 66 || !strings.Contains(got.stderr, "has stored no completions") {
		t.Error(got.text())
	}
}

// Without a running daemon both commands read the state folder and start none.
func TestReportAndCompletionsReadAStateFolder(t *testing.T) {
	t.Parallel()
	state := t.TempDir()
	place := sqldb.Files(filepath.Join(state, "db"))
	run := (&fake{directory: filepath.Join(state, "runs", runID)}).run(runv1.RunState_RUN_STATE_SUCCEEDED, 3)
	if _, err := sqldbtest.Store(t, place, schedulerstore.Open).Create(t.Context(), run, "", scheduler.Cursor{}); err != nil {
		t.Fatal(err)
	}
	if _, err := sqldbtest.Store(t, place, storagestore.Open).Append(t.Context(), keptStory()); err != nil {
		t.Fatal(err)
	}
	sqldbtest.Store(t, place, snapshotstore.Open)

	got := call{}.run(t, "report", "addition-grpo", "--state-dir", state, "--format", "json")
	var paths struct{ PNG, HTML string }
	if err := json.Unmarshal([]byte(got.stdout), &paths); err != nil || got.code != 0 {
		t.Fatal(got.text())
	}
	if page := read(t, paths.HTML); !strings.Contains(page, "Completions of step 1") || !strings.Contains(page, "Completions of step 3") || !strings.Contains(page, "&lt;b&gt;42") {
		t.Errorf("the page lacks completions:\n%s", page)
	}
	got = call{}.run(t, "completions", "addition-grpo", "--state-dir", state)
	if got.code != 0 || !strings.Contains(got.stdout, "step 3") || !strings.Contains(got.stderr, "no control plane is running here") {
		t.Error(got.text())
	}
	if got := (call{}).run(t, "report", "addition-grpo", "--state-dir", t.TempDir()); got.code != 66 {
		t.Error(got.text())
	}
}
