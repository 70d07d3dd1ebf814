package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/blob"
	blobfiles "github.com/rollout-rl/rollout/libs/blob/files"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
	schedulerstore "github.com/rollout-rl/rollout/services/scheduler/sqlstore"
	snapshotstore "github.com/rollout-rl/rollout/services/snapshot/sqlstore"
	storagestore "github.com/rollout-rl/rollout/services/storage/sqlstore"
)

// stored is a state folder with a run and three of its snapshots: one of adapters and their base,
// one with an adapter next to the weights, and the newest.
func stored(t *testing.T) (state string) {
	t.Helper()
	return storedRun(t, (&fake{}).run(runv1.RunState_RUN_STATE_SUCCEEDED, 3))
}

func storedRun(t *testing.T, run *runv1.Run) (state string) {
	t.Helper()
	state = t.TempDir()
	place := sqldb.Files(filepath.Join(state, "db"))
	if _, err := sqldbtest.Store(t, place, schedulerstore.Open).Create(t.Context(), run, "", scheduler.Cursor{}); err != nil {
		t.Fatal(err)
	}
	sqldbtest.Store(t, place, storagestore.Open)
	artifacts, err := blobfiles.Open(filepath.Join(state, "artifacts"))
	if err != nil {
		t.Fatal(err)
	}
	cas, snapshots := blob.NewCAS(artifacts, artifacts.Spool()), sqldbtest.Store(t, place, snapshotstore.Open)
	for step, paths := range map[uint64][]string{
		1: {"base/config.json", "adapter/adapter_config.json", "state.json"},
		2: {"weights/config.json", "adapter/adapter_config.json", "average/config.json", "state.json"}, 3: {"weights/config.json", "weights/model.safetensors", "state.json"},
	} {
		s := proto.CloneOf(snapshot())
		s.SnapshotId, s.Step, s.Files = map[uint64]string{1: "snap-adapted", 2: "snap-earlier", 3: "snap-newest"}[step], step, nil
		for _, path := range paths {
			content, err := cas.PutBytes(t.Context(), []byte(path+" of step "+string(rune('0'+step))))
			if err != nil {
				t.Fatal(err)
			}
			s.Files = append(s.Files, &snapshotv1.SnapshotFile{Path: path, Digest: content})
		}
		if _, err := snapshots.Record(t.Context(), s, nil); err != nil {
			t.Fatal(err)
		}
	}
	return state
}

func TestExportWeightsOfAStateFolder(t *testing.T) {
	t.Parallel()
	state, out := stored(t), t.TempDir()
	export := func(args ...string) result {
		return call{}.run(t, append([]string{"export", "weights", "--state-dir", state}, args...)...)
	}
	got := export("addition-grpo", "--to", filepath.Join(out, "new/weights"))
	if got.code != 0 || read(t, filepath.Join(out, "new/weights/model.safetensors")) != "weights/model.safetensors of step 3" {
		t.Fatal(got.text())
	}
	if got := export("snap-adapted", "--to", filepath.Join(out, "adapted"), "--adapter"); got.code != 0 ||
		!strings.Contains(got.stderr, "it adapts the model of its run, which `rollout export weights snap-adapted --base --to DIR` exports with its tokenizer") {
		t.Error(got.text())
	}
	if got := export("snap-earl", "--to", filepath.Join(out, "adapter"), "--adapter"); got.code != 0 || read(t, filepath.Join(out, "adapter/adapter_config.json")) != "adapter/adapter_config.json of step 2" {
		t.Fatal(got.text())
	}
	if got := export("snap-earl", "--to", filepath.Join(out, "average"), "--average"); got.code != 0 || read(t, filepath.Join(out, "average/config.json")) != "average/config.json of step 2" {
		t.Fatal(got.text())
	}
	for text, args := range map[string][]string{
		"snapshot snap-newest has no average": {"addition-grpo", "--to", filepath.Join(out, "none"), "--average"},
		"mutually exclusive":                  {"addition-grpo", "--to", filepath.Join(out, "none"), "--average", "--adapter"},
		"already exists":                      {"addition-grpo", "--to", filepath.Join(out, "adapter")},
		"snapshot snap-newest has no adapter": {"addition-grpo", "--to", filepath.Join(out, "none"), "--adapter"},
		"unknown":                             {"unknown", "--to", filepath.Join(out, "none")},
		`required flag(s) "to" not set`:       {"addition-grpo"},
	} {
		if got := export(args...); got.code == 0 || !strings.Contains(got.stderr, text) {
			t.Errorf("%s: %s", text, got.text())
		}
	}
	left, err := os.ReadDir(out)
	if err != nil || len(left) != 4 { // new, adapted, adapter and average, no scratch
		t.Errorf("%v, %v", left, err)
	}
}

// merger is a worker whose merged weights are the two settings of base and adapter.
const merger = `#!/bin/sh
value() { sed 's/.*"'$1'":"\([^"]*\)".*/\1/' "$2"; }
[ "$1 $2" = "merge --spec" ] || exit 9
mkdir "$(value to "$3")"
cat "$(value base "$3")/config.json" "$(value adapter "$3")/adapter_config.json" > "$(value to "$3")/model.safetensors"
echo "a library says hello"
`

func TestExportWeightsMergesAdapters(t *testing.T) {
	t.Parallel()
	state, out := stored(t), t.TempDir()
	export := func(worker, to string, args ...string) result {
		script := filepath.Join(t.TempDir(), "worker")
		if err := os.WriteFile(script, []byte(worker), 0o700); err != nil {
			t.Fatal(err)
		}
		return call{}.run(t, append([]string{"export", "weights", "snap-adapted", "--state-dir", state, "--to", filepath.Join(out, to), "--worker", script}, args...)...)
	}
	done := `echo '{"digest": "` + snapshot().GetWeightsDigest() + `"}'`
	got := export(merger+done, "merged")
	if want := "base/config.json of step 1adapter/adapter_config.json of step 1"; got.code != 0 || strings.Contains(got.stderr, "rounding") || read(t, filepath.Join(out, "merged/model.safetensors")) != want {
		t.Fatal(got.text())
	}
	if got := export(merger+`echo '{"digest": "blake3-other"}'`, "rounded"); got.code != 0 || !strings.Contains(got.stderr, "differ in rounding") {
		t.Error(got.text())
	}
	if got := export("", "base", "--base"); got.code != 0 || read(t, filepath.Join(out, "base/config.json")) != "base/config.json of step 1" {
		t.Error(got.text())
	}
	for text, worker := range map[string]string{
		"the lora table differs": merger + `echo '{"reason": "WEIGHTS_UNREADABLE", "message": "the lora table differs", "fix": "compare"}'; exit 65`,
		"out of memory":          "#!/bin/sh\necho out of memory >&2; exit 1",
		"start the worker":       "",
	} {
		if got := export(worker, "none"); got.code == 0 || !strings.Contains(got.stderr, text) {
			t.Errorf("%s: %s", text, got.text())
		}
	}
	left, err := os.ReadDir(out)
	if err != nil || len(left) != 3 { // merged, rounded and base, no scratch
		t.Errorf("%v, %v", left, err)
	}
}

// A damaged file is never exported.
func TestExportWeightsRefusesADamagedFile(t *testing.T) {
	t.Parallel()
	state, out := stored(t), filepath.Join(t.TempDir(), "weights")
	err := filepath.WalkDir(filepath.Join(state, "artifacts"), func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.Contains(read(t, path), "model.safetensors") {
			return err
		}
		return os.WriteFile(path, []byte("flipped"), 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := (call{}).run(t, "export", "weights", "addition-grpo", "--state-dir", state, "--to", out); got.code == 0 {
		t.Error(got.text())
	}
	if _, err := os.Stat(out); !os.IsNotExist(err) {
		t.Errorf("something was left: %v", err)
	}
}
