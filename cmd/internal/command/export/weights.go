package export

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/trainstate"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// partFlags choose the part of a snapshot that is exported.
type partFlags struct{ adapter, base, average bool }

func (f *partFlags) addTo(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.adapter, "adapter", false, "export only the adapter")
	cmd.Flags().BoolVar(&f.average, "average", false, "export the moving average of the weights")
	cmd.MarkFlagsMutuallyExclusive("adapter", "average")
}

// name returns the folder of the part in the snapshot.
func (f *partFlags) name() string {
	switch {
	case f.adapter:
		return trainstate.Adapter
	case f.base:
		return trainstate.Base
	case f.average:
		return "average"
	}
	return trainstate.Weights
}

// writePart writes a part of a snapshot and returns the digest of the weights. It warns if merged
// weights differ from those of the run.
func writePart(ctx context.Context, env *cli.Env, e record.Export, snapshot *snapshotv1.Snapshot, part, folder string) (digest string, err error) {
	digest, err = e.Write(ctx, snapshot, part, folder)
	if err == nil && digest != snapshot.GetWeightsDigest() {
		env.Note("the merged weights differ in rounding from those of the run, because another kind of processor merged them: %s, not %s", digest, snapshot.GetWeightsDigest())
	}
	return digest, err
}

func weightsCommand(env *cli.Env) *cobra.Command {
	var to string
	var flags partFlags
	var worker cli.WorkerFlag
	cmd := &cobra.Command{
		Use:   "weights (RUN | SNAPSHOT)",
		Short: "Export the weights of a snapshot in the Hugging Face layout",
		Long: `Export the weights of a snapshot, or of the newest snapshot of a run, to a folder in the Hugging Face layout, which transformers and
vLLM load. Every file is verified against its digest.

If the run trains adapters ([lora]), a worker merges them into the model. --adapter exports only the adapter, in the PEFT layout;
--base exports the model that the adapter belongs to, as it was when the run was planned. --average exports the moving average of the
weights, if the run keeps one (train.ema_decay).

If a control plane runs, it writes the files on its own host. If not, the command reads the state folder and starts no service. ` + cli.RunHelp,
		Example: `  rollout export weights addition-grpo --to models/addition-grpo
  rollout export weights snap-01kapq5q5m --to adapter --adapter
  rollout export weights addition-lora --to models/base --base`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			folder, err := filepath.Abs(to)
			if err != nil {
				return err
			}
			return env.Plane.Records(cmd, func(ctx context.Context, r record.Reader) error {
				snapshot, err := record.SnapshotOf(ctx, r, args[0])
				if err != nil {
					return err
				}
				part := flags.name()
				digest, err := writePart(ctx, env, record.Export{Reader: r, Worker: worker.Command()}, snapshot, part, folder)
				if err != nil {
					return err
				}
				if env.JSON() {
					return output.Value(env.Stdout, map[string]any{
						"run_id": snapshot.GetRunId(), "snapshot_id": snapshot.GetSnapshotId(), "step": snapshot.GetStep(),
						"weights_digest": digest, "part": part, "directory": folder,
					})
				}
				if part == trainstate.Adapter && trainstate.Has(snapshot, trainstate.Base) {
					env.Note("it adapts %s, which `rollout export weights %s --base --to DIR` exports with its tokenizer", baseOf(folder), snapshot.GetSnapshotId())
				}
				fmt.Fprintf(env.Stdout, "%s of step %s of %s: %s\n", part, output.Count(snapshot.GetStep()), snapshot.GetRunId(), folder)
				return nil
			})
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "new `folder` to write to")
	flags.addTo(cmd)
	cmd.Flags().BoolVar(&flags.base, "base", false, "export the model that the adapter belongs to")
	cmd.MarkFlagsMutuallyExclusive("adapter", "base", "average")
	worker.AddTo(cmd)
	_ = cmd.MarkFlagRequired("to")
	_ = cmd.MarkFlagDirname("to")
	return cmd
}

// baseOf is the model that the adapter in a folder names.
func baseOf(folder string) string {
	var config struct {
		Base string `json:"base_model_name_or_path"`
	}
	text, err := os.ReadFile(filepath.Join(folder, "adapter_config.json"))
	if err != nil || json.Unmarshal(text, &config) != nil || config.Base == "" {
		return "the model of its run"
	}
	return config.Base
}
