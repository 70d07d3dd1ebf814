package record

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/tempdir"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/merge"
	"github.com/rollout-rl/rollout/libs/trainstate"
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

// Export writes parts of snapshots to new folders, each atomically.
type Export struct {
	Reader
	Worker []string // command that starts a worker, which merges adapters
}

// Keep returns the folder in models with the weights of a snapshot, and writes it if it does not
// exist.
func (e Export) Keep(ctx context.Context, snapshot *snapshotv1.Snapshot, models string) (folder string, err error) {
	folder = filepath.Join(models, snapshot.GetSnapshotId())
	if _, err := os.Stat(folder); errors.Is(err, os.ErrNotExist) {
		_, err = e.Write(ctx, snapshot, trainstate.Weights, folder)
		return folder, err
	}
	return folder, nil
}

// Write writes one folder of a snapshot, and returns the digest of the weights: of merged weights
// it can differ from the digest of the snapshot.
func (e Export) Write(ctx context.Context, snapshot *snapshotv1.Snapshot, part, folder string) (digest string, err error) {
	if part == trainstate.Weights && trainstate.Adapted(snapshot) {
		return e.merged(ctx, snapshot, folder)
	}
	return snapshot.GetWeightsDigest(), e.part(ctx, snapshot, part, folder)
}

// merged writes the weights of a snapshot of adapters.
func (e Export) merged(ctx context.Context, snapshot *snapshotv1.Snapshot, folder string) (digest string, err error) {
	if !trainstate.Has(snapshot, trainstate.Base) {
		return "", exit.New(exit.Data, "export the adapters with --adapter, and merge them into the model that they were trained on",
			"snapshot %s has adapters without the model that they belong to", snapshot.GetSnapshotId())
	}
	status, err := e.Run(ctx, snapshot.GetRunId())
	if err != nil {
		return "", err
	}
	err = e.write(ctx, trainstate.Only(snapshot, trainstate.Base, trainstate.Adapter), folder, func(files string) (string, error) {
		job := merge.Job{
			Config: status.GetRun().GetPlan().GetConfig(), Step: snapshot.GetStep(), Worker: e.Worker, Scratch: files,
			Base: filepath.Join(files, trainstate.Base), Adapter: filepath.Join(files, trainstate.Adapter), To: filepath.Join(files, "merged"),
		}
		digest, err = job.Run(ctx)
		return job.To, err
	})
	return digest, err
}

func (e Export) part(ctx context.Context, snapshot *snapshotv1.Snapshot, part, folder string) error {
	wanted := trainstate.Only(snapshot, part)
	if len(wanted.GetFiles()) == 0 {
		fix := map[string]string{
			trainstate.Weights: "choose another snapshot of `rollout snapshot list`",
			trainstate.Adapter: "export without --adapter: the run trained all weights",
			trainstate.Base:    "export without --base: only runs that train adapters store their model",
			"average":          "export without --average: a run keeps an average only if `train.ema_decay` is above 0",
		}[part]
		return exit.New(exit.Data, fix, "snapshot %s has no %s", snapshot.GetSnapshotId(), part)
	}
	return e.write(ctx, wanted, folder, func(files string) (string, error) { return filepath.Join(files, part), nil })
}

// write writes the files of a snapshot to a temporary folder and renames the folder that result
// returns.
func (e Export) write(ctx context.Context, wanted *snapshotv1.Snapshot, folder string, result func(files string) (string, error)) (err error) {
	if _, err := os.Lstat(folder); !errors.Is(err, os.ErrNotExist) {
		return exit.New(exit.CannotMake, "choose a folder that does not exist", "%s already exists", folder)
	}
	cannot := func(err error) error {
		return exit.New(exit.CannotMake, "choose another folder with --to", "cannot write %s: %w", folder, err)
	}
	if err := os.MkdirAll(filepath.Dir(folder), 0o755); err != nil {
		return cannot(err)
	}
	made, err := tempdir.Make(filepath.Dir(folder), ".export-")
	if err != nil {
		return cannot(err)
	}
	defer func() { err = errors.Join(err, made.Remove()) }()
	files := filepath.Join(made.Path, "files")
	if err := e.Materialize(ctx, wanted, files); err != nil {
		return err
	}
	finished, err := result(files)
	if err != nil {
		return err
	}
	if err := os.Rename(finished, folder); err != nil {
		return cannot(err)
	}
	return nil
}
