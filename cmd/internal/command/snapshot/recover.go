package snapshot

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/paging"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

func recoverCommand(env *cli.Env) *cobra.Command {
	var inputs string
	cmd := &cobra.Command{
		Use:   "recover [RUN_ID]",
		Short: "Add the snapshots of a lost control plane, which are in the bucket",
		Long: "Add the snapshots of a lost control plane, which are in the bucket. Start the new control plane with the `[blob] url` of the lost one.\n" +
			"Snapshots keep their ids. A second call changes nothing.\n\n" +
			"The files that a plan reads (model, data, reward) are not in the bucket. Restored runs read them in the folder where they were, or\n" +
			"for one run in that of --inputs, also if its snapshots were added before.",
		Example: "  rollout snapshot recover\n  rollout snapshot recover run-01kapq5q5mz3gq5p1cs0e8q0vd --inputs /data/addition",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			request := &snapshotv1.RecoverSnapshotsRequest{}
			if len(args) == 1 {
				request.RunId = args[0]
			}
			if inputs != "" {
				if request.RunId == "" {
					return cli.Usage("--inputs is the folder of one run: name the run, RUN_ID")
				}
				folder, err := filepath.Abs(inputs)
				if err != nil {
					return err
				}
				request.BaseDir = folder
			}
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
				found := &snapshotv1.RecoverSnapshotsResponse{}
				_, err := paging.Some(0, 1000, func(size int, token string) (int, string, error) {
					request.PageSize, request.PageToken = uint32(size), token
					page, err := c.Snapshot.RecoverSnapshots(ctx, request)
					found.Snapshots = append(found.Snapshots, page.GetSnapshots()...)
					return len(page.GetSnapshots()), page.GetNextPageToken(), err
				})
				if err != nil {
					return err
				}
				explain(env, found.GetSnapshots())
				return env.Message(found, func() string { return recoveredText(env, found.GetSnapshots()) })
			})
		},
	}
	cmd.Flags().StringVar(&inputs, "inputs", "", "`folder` that the paths of the run's plan are relative to on this host (default: where it was)")
	return cmd
}

// explain notes what was not added, and which folders are missing here.
func explain(env *cli.Env, found []*snapshotv1.RecoveredSnapshot) {
	seen := map[string]bool{}
	for _, one := range found {
		s := one.GetSnapshot()
		if one.GetProblem() != "" {
			env.Note("%s of step %s of %s was not added: %s", s.GetSnapshotId(), output.Count(s.GetStep()), s.GetRunId(), one.GetProblem())
			continue
		}
		folder := s.GetOrigin().GetBaseDir()
		if folder == "" || seen[folder] {
			continue
		}
		seen[folder] = true
		if _, err := os.Stat(folder); err != nil {
			env.Note("restored runs of %s read their inputs in %s, which does not exist here: copy it, or give its place with `rollout snapshot recover %s --inputs FOLDER`",
				s.GetRunId(), folder, s.GetRunId())
		}
	}
}

func recoveredText(env *cli.Env, found []*snapshotv1.RecoveredSnapshot) string {
	added := &snapshotv1.ListSnapshotsResponse{}
	known := 0
	for i := range found {
		one := found[len(found)-1-i] // newest first
		switch {
		case one.GetKnown():
			known++
		case one.GetProblem() == "":
			added.Snapshots = append(added.Snapshots, one.GetSnapshot())
		}
	}
	if len(added.GetSnapshots()) == 0 {
		return fmt.Sprintf("nothing to add: the bucket has %s, %d of them known here\n", output.Plural(len(found), "snapshot"), known)
	}
	return fmt.Sprintf("added %s\n%snext: rollout snapshot restore %s\n", output.Plural(len(added.GetSnapshots()), "snapshot"), snapshotsText(env, added), added.GetSnapshots()[0].GetSnapshotId())
}
