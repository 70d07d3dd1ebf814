package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/exit"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/cmd/internal/scratch"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

func (a *app) exportWeights() *cobra.Command {
	var to string
	var adapter, average bool
	cmd := &cobra.Command{
		Use:   "weights (RUN | SNAPSHOT)",
		Short: "Write the weights of a snapshot as a folder that transformers loads",
		Long: `Write the weights of a snapshot, or of a run's newest one, as a folder in the Hugging Face layout: from_pretrained and vLLM load it as
it is. Where the run trained adapters ([lora]) they are merged in; --adapter writes the adapter alone, as PEFT loads it. --average writes
the moving average of the weights, where the run keeps one (train.ema_decay). Every file is held against its digest.

Where a control plane runs it is asked, and writes to its own host; else its state folder is read, and nothing is started. ` + runArgument,
		Example: `  rollout export weights addition-grpo --to models/addition-grpo
  rollout export weights snap-01kapq5q5m --to adapter --adapter`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			folder, err := filepath.Abs(to)
			if err != nil {
				return err
			}
			return a.records(cmd, func(ctx context.Context, r record.Reader) error {
				snapshot, err := snapshotOf(ctx, r, args[0])
				if err != nil {
					return err
				}
				part := "weights"
				switch {
				case adapter:
					part = "adapter"
				case average:
					part = "average"
				}
				if err := writePart(ctx, r, snapshot, part, folder); err != nil {
					return err
				}
				if a.format == formatJSON {
					return output.Value(a.stdout, map[string]any{
						"run_id": snapshot.GetRunId(), "snapshot_id": snapshot.GetSnapshotId(), "step": snapshot.GetStep(),
						"weights_digest": snapshot.GetWeightsDigest(), "part": part, "directory": folder,
					})
				}
				fmt.Fprintf(a.stdout, "%s of step %s of %s: %s\n", part, output.Count(snapshot.GetStep()), snapshot.GetRunId(), folder)
				return nil
			})
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "new `folder` to write")
	cmd.Flags().BoolVar(&adapter, "adapter", false, "write the adapter alone")
	cmd.Flags().BoolVar(&average, "average", false, "write the moving average of the weights")
	cmd.MarkFlagsMutuallyExclusive("adapter", "average")
	_ = cmd.MarkFlagRequired("to")
	_ = cmd.MarkFlagDirname("to")
	return cmd
}

// snapshotOf is the snapshot of an id, or the newest of a run.
func snapshotOf(ctx context.Context, r record.Reader, name string) (*snapshotv1.Snapshot, error) {
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
		err = exit.New(exit.NoInput, "name another run: there is a snapshot after its last step, and every `snapshot.every_steps` before", "run %s has no snapshot", run)
	}
	return snapshot, err
}

// writePart writes one folder of a snapshot to a new place: whole, or not at all.
func writePart(ctx context.Context, r record.Reader, snapshot *snapshotv1.Snapshot, part, folder string) (err error) {
	if _, err := os.Lstat(folder); !errors.Is(err, os.ErrNotExist) {
		return exit.New(exit.CannotMake, "name one that is not there yet", "%s is there already", folder)
	}
	wanted := proto.CloneOf(snapshot)
	wanted.Files = slices.DeleteFunc(wanted.Files, func(f *snapshotv1.SnapshotFile) bool { return !strings.HasPrefix(f.GetPath(), part+"/") })
	if len(wanted.GetFiles()) == 0 {
		fix := map[string]string{
			"weights": "`rollout snapshot list` shows others",
			"adapter": "export without --adapter: its weights are whole",
			"average": "export without --average; one is kept where `ema_decay` in [train] is above 0",
		}[part]
		return exit.New(exit.Data, fix, "snapshot %s holds no %s", snapshot.GetSnapshotId(), part)
	}
	cannot := func(err error) error {
		return exit.New(exit.CannotMake, "name another folder with --to", "can't write the %s: %w", part, err)
	}
	if err := os.MkdirAll(filepath.Dir(folder), 0o755); err != nil {
		return cannot(err)
	}
	made, err := scratch.Make(filepath.Dir(folder), ".export-")
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
