package main

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/cmd/internal/exit"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
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
	} {
		f := &fake{history: keptStory(), state: runv1.RunState_RUN_STATE_SUCCEEDED}
		got := command{plane: newPlane(t, f)}.run(t, append([]string{"completions", "addition-grpo", "--server", "here"}, strings.Fields(args)...)...)
		golden(t, "testdata/command/"+name+".txt", got.text())
	}
	got := command{plane: newPlane(t, &fake{history: story(), state: runv1.RunState_RUN_STATE_SUCCEEDED})}.run(t, "completions", "addition-grpo", "--server", "here")
	if got.code != 66 || !strings.Contains(got.stderr, "keeps no completions") {
		t.Error(got.text())
	}
}

// Why a run has no completions decides what to do about it.
func TestNoCompletions(t *testing.T) {
	t.Parallel()
	const running, failed, succeeded = runv1.RunState_RUN_STATE_RUNNING, runv1.RunState_RUN_STATE_FAILED, runv1.RunState_RUN_STATE_SUCCEEDED
	rows := &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Dpo{}}
	for _, c := range []struct {
		algorithm *configv1.AlgorithmConfig
		state     runv1.RunState
		made, of  uint64
		want      string
	}{
		{nil, running, 0, 0, "run r has no completions: it has made no step yet; wait for it: `rollout runs show r` tells how far the run is"},
		{nil, running, 3, 40, "run r has no completions of step 40: its last step is 3; wait for it: `rollout runs show r` tells how far the run is"},
		{nil, failed, 0, 0, "run r has no completions: it has made no step yet; `rollout run --resume r` goes on with it"},
		{nil, succeeded, 3, 4, "run r has no completions of step 4: its last step is 3; name one of its steps"},
		{nil, running, 3, 2, "run r keeps no completions of step 2; see `per_step` and `every_steps` of [completions] in its configuration"},
		{rows, running, 0, 0, "run r has no completions: DPO trains on rows and samples none; `rollout report r` shows the held-out answers, where [eval] asks for some"},
	} {
		run := &runv1.Run{RunId: "r", State: c.state, Step: c.made, Plan: &planv1.Plan{Config: &configv1.RunConfig{Algorithm: c.algorithm}}}
		var typed *exit.Error
		if err := noCompletions(run, c.of); !errors.As(err, &typed) || typed.Code != exit.NoInput || typed.Error()+"; "+typed.Fix != c.want {
			t.Errorf("got  %v; %s\nwant %s", err, typed.Fix, c.want)
		}
	}
}

// Where no daemon runs, what is stored is read from the state folder, and none is started.
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

	got := command{}.run(t, "report", "addition-grpo", "--state-dir", state, "--format", "json")
	var paths struct{ PNG, HTML string }
	if err := json.Unmarshal([]byte(got.stdout), &paths); err != nil || got.code != 0 {
		t.Fatal(got.text())
	}
	if page := read(t, paths.HTML); !strings.Contains(page, "Completions of step 1") || !strings.Contains(page, "Completions of step 3") || !strings.Contains(page, "&lt;b&gt;42") {
		t.Errorf("the page lacks completions:\n%s", page)
	}
	got = command{}.run(t, "completions", "addition-grpo", "--state-dir", state)
	if got.code != 0 || !strings.Contains(got.stdout, "step 3") || !strings.Contains(got.stderr, "no control plane runs here") {
		t.Error(got.text())
	}
	if got := (command{}).run(t, "report", "addition-grpo", "--state-dir", t.TempDir()); got.code != 66 {
		t.Error(got.text())
	}
}
