package record

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/tempdir"
	"github.com/rollout-rl/rollout/libs/exit"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// SnapshotOf returns the snapshot of an id, or the newest one of a run.
func SnapshotOf(ctx context.Context, r Reader, name string) (*snapshotv1.Snapshot, error) {
	if strings.HasPrefix(name, "snap-") {
		return r.Snapshot(ctx, name)
	}
	status, err := r.Run(ctx, name)
	if err != nil {
		return nil, err
	}
	run := status.GetRun().GetRunId()
	snapshot, err := r.NewestSnapshot(ctx, run)
	if err == nil && snapshot == nil {
		err = exit.New(exit.NoInput, "choose another run: snapshots are taken after the last step, and every `snapshot.every_steps` steps", "run %s has no snapshot", run)
	}
	return snapshot, err
}

// WritePart writes one folder of a snapshot to a new folder, atomically.
func WritePart(ctx context.Context, r Reader, snapshot *snapshotv1.Snapshot, part, folder string) (err error) {
	if _, err := os.Lstat(folder); !errors.Is(err, os.ErrNotExist) {
		return exit.New(exit.CannotMake, "choose a folder that does not exist", "%s already exists", folder)
	}
	wanted := proto.CloneOf(snapshot)
	wanted.Files = slices.DeleteFunc(wanted.Files, func(f *snapshotv1.SnapshotFile) bool { return !strings.HasPrefix(f.GetPath(), part+"/") })
	if len(wanted.GetFiles()) == 0 {
		fix := map[string]string{
			"weights": "choose another snapshot of `rollout snapshot list`",
			"adapter": "export without --adapter: the run trained all weights",
			"average": "export without --average: a run keeps an average only if `train.ema_decay` is above 0",
		}[part]
		return exit.New(exit.Data, fix, "snapshot %s has no %s", snapshot.GetSnapshotId(), part)
	}
	cannot := func(err error) error {
		return exit.New(exit.CannotMake, "choose another folder with --to", "cannot write the %s: %w", part, err)
	}
	if err := os.MkdirAll(filepath.Dir(folder), 0o755); err != nil {
		return cannot(err)
	}
	made, err := tempdir.Make(filepath.Dir(folder), ".export-")
	if err != nil {
		return cannot(err)
	}
	defer func() { err = errors.Join(err, made.Remove()) }()
	if err := r.Materialize(ctx, wanted, filepath.Join(made.Path, "files")); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(made.Path, "files", part), folder); err != nil {
		return cannot(err)
	}
	return nil
}
