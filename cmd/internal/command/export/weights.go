package export

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
)

// partFlags choose the part of a snapshot that is exported.
type partFlags struct{ adapter, average bool }

func (f *partFlags) addTo(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.adapter, "adapter", false, "export only the adapter")
	cmd.Flags().BoolVar(&f.average, "average", false, "export the moving average of the weights")
	cmd.MarkFlagsMutuallyExclusive("adapter", "average")
}

// name returns the folder of the part in the snapshot.
func (f *partFlags) name() string {
	switch {
	case f.adapter:
		return "adapter"
	case f.average:
		return "average"
	}
	return "weights"
}

func weightsCommand(env *cli.Env) *cobra.Command {
	var to string
	var flags partFlags
	cmd := &cobra.Command{
		Use:   "weights (RUN | SNAPSHOT)",
		Short: "Export the weights of a snapshot in the Hugging Face layout",
		Long: `Export the weights of a snapshot, or of the newest snapshot of a run, to a folder in the Hugging Face layout, which transformers and
vLLM load. Adapters ([lora]) are merged into the weights; --adapter exports only the adapter, in the PEFT layout. --average exports the
moving average of the weights, if the run keeps one (train.ema_decay). Every file is verified against its digest.

If a control plane runs, it writes the folder on its own host. If not, the command reads the state folder and starts nothing. ` + cli.RunHelp,
		Example: `  rollout export weights addition-grpo --to models/addition-grpo
  rollout export weights snap-01kapq5q5m --to adapter --adapter`,
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
				if err := record.WritePart(ctx, r, snapshot, part, folder); err != nil {
					return err
				}
				if env.JSON() {
					return output.Value(env.Stdout, map[string]any{
						"run_id": snapshot.GetRunId(), "snapshot_id": snapshot.GetSnapshotId(), "step": snapshot.GetStep(),
						"weights_digest": snapshot.GetWeightsDigest(), "part": part, "directory": folder,
					})
				}
				fmt.Fprintf(env.Stdout, "%s of step %s of %s: %s\n", part, output.Count(snapshot.GetStep()), snapshot.GetRunId(), folder)
				return nil
			})
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "new `folder` to write to")
	flags.addTo(cmd)
	_ = cmd.MarkFlagRequired("to")
	_ = cmd.MarkFlagDirname("to")
	return cmd
}
