package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	bufferstore "github.com/rollout-rl/rollout/services/buffer/sqlstore"
	"github.com/rollout-rl/rollout/services/scheduler"
	schedulerstore "github.com/rollout-rl/rollout/services/scheduler/sqlstore"
	snapshotstore "github.com/rollout-rl/rollout/services/snapshot/sqlstore"
	storagestore "github.com/rollout-rl/rollout/services/storage/sqlstore"
)

// left returns the state folder of a control plane that died during a run.
func left(t *testing.T) (state string) {
	t.Helper()
	state = t.TempDir()
	place := sqldb.Files(filepath.Join(state, "db"))
	run := (&fake{directory: filepath.Join(state, "runs", runID)}).run(runv1.RunState_RUN_STATE_RUNNING, 2)
	if _, err := sqldbtest.Store(t, place, schedulerstore.Open).Create(t.Context(), run, "", scheduler.Cursor{}); err != nil {
		t.Fatal(err)
	}
	if _, err := sqldbtest.Store(t, place, storagestore.Open).Append(t.Context(), story()); err != nil {
		t.Fatal(err)
	}
	if _, err := sqldbtest.Store(t, place, snapshotstore.Open).Record(t.Context(), snapshot(), nil); err != nil {
		t.Fatal(err)
	}
	return state
}

// Without a control plane, reading commands use the state folder. Runs that were active when it
// died are shown as interrupted.
func TestStateFolderIsRead(t *testing.T) {
	t.Parallel()
	state := left(t)
	for _, c := range []struct {
		args string
		want []string
	}{
		{"runs list", []string{runID, "INTERRUPTED", "2/3"}},
		{"runs list --state interrupted", []string{runID}},
		{"runs list --state running", []string{"no run is running"}},
		{"runs list --format json", []string{`"RUN_STATE_INTERRUPTED"`}},
		{"runs show addition-grpo", []string{"INTERRUPTED", "the control plane stopped unexpectedly", "0.900"}},
		{"logs tail addition-grpo --follow", []string{"step=3"}},
		{"snapshot list addition-grpo", []string{snapshot().GetSnapshotId()}},
		{"snapshot show " + snapshot().GetSnapshotId(), []string{"run", runID}},
	} {
		got := call{}.run(t, append(strings.Fields(c.args), "--state-dir", state)...)
		for _, want := range c.want {
			if got.code != 0 || !strings.Contains(got.stdout, want) {
				t.Errorf("%s: %q is missing\n%s", c.args, want, got.text())
			}
		}
		if !strings.Contains(c.args, "json") && !strings.Contains(got.stderr, "no control plane is running here") {
			t.Errorf("%s does not say where it looked: %s", c.args, got.stderr)
		}
	}
	for _, args := range []string{"runs show unknown", "snapshot show snap-none", "snapshot list unknown", "logs tail unknown"} {
		if got := (call{}).run(t, append(strings.Fields(args), "--state-dir", state)...); got.code == 0 || !strings.Contains(got.stderr, "no") {
			t.Errorf("%s: %s", args, got.text())
		}
	}
}

// The ledger of a killed control plane can be ahead of the record of the run: all commands show the
// steps of the ledger.
func TestStateFolderShowsTheStepsOfTheLedger(t *testing.T) {
	t.Parallel()
	state := left(t)
	weights := filepath.Join(state, "runs", runID, "weights", "v000003")
	if err := os.MkdirAll(weights, 0o700); err != nil {
		t.Fatal(err)
	}
	digest := id.Content([]byte("weights"))
	ledgers := sqldbtest.Store(t, sqldb.Files(filepath.Join(state, "db")), bufferstore.Open)
	if err := ledgers.Create(t.Context(), runID, &bufferv1.LedgerConfig{GroupsPerStep: 1, GroupSize: 1, Rows: 7}, nil); err != nil {
		t.Fatal(err)
	}
	if err := ledgers.Update(t.Context(), runID, func(tx ledger.Tx) error {
		tx.Ledger().Step = 3
		return tx.PutStep(t.Context(), &ledger.Step{Step: 3, WeightsDigest: digest, Chain: "link"})
	}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args string
		want []string
	}{
		{"runs list", []string{"INTERRUPTED", "3/3"}},
		{"runs show addition-grpo --format json", []string{`"RUN_STATE_INTERRUPTED"`, weights, digest}},
		{"audit addition-grpo", []string{runID + ", INTERRUPTED"}},
	} {
		got := call{}.run(t, append(strings.Fields(c.args), "--state-dir", state)...)
		for _, want := range c.want {
			if !strings.Contains(got.stdout, want) {
				t.Errorf("%s: %q is missing\n%s", c.args, want, got.text())
			}
		}
	}
}

// A state folder that this user may only read can be read.
func TestReadOnlyStateFolderIsRead(t *testing.T) {
	t.Parallel()
	if os.Getuid() == 0 {
		t.Skip("root may write everywhere")
	}
	state := left(t)
	folder := filepath.Join(state, "db")
	files, _ := filepath.Glob(filepath.Join(folder, "*"))
	for _, file := range files {
		if err := os.Chmod(file, 0o400); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(folder, 0o500); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Chmod(folder, 0o700) })
	for _, args := range []string{"runs list", "runs show addition-grpo", "logs tail addition-grpo", "snapshot list addition-grpo"} {
		if got := (call{}).run(t, append(strings.Fields(args), "--state-dir", state)...); got.code != 0 {
			t.Errorf("%s: %s", args, got.text())
		}
	}
}
