package snapshot

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

func deleteCommand(env *cli.Env) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "delete SNAPSHOT...",
		Short: "Delete snapshots and the files that no other snapshot has",
		Long: "Delete snapshots and the files that no other snapshot has. SNAPSHOT is its id, or a unique prefix of the id.\n\n" +
			"A snapshot that a run started from is not deleted, nor is the newest training state of an active run, which needs it to recover.",
		Example: "  rollout snapshot delete snap-01kapq5q5m --yes",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
				chosen := &snapshotv1.ListSnapshotsResponse{}
				for _, name := range args {
					got, err := c.Snapshot.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: name})
					if err != nil {
						return err
					}
					chosen.Snapshots = append(chosen.Snapshots, got.GetSnapshot())
				}
				if err := confirm(env, yes, chosen); err != nil {
					return err
				}
				for _, snapshot := range chosen.GetSnapshots() {
					if _, err := c.Snapshot.DeleteSnapshot(ctx, &snapshotv1.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()}); err != nil {
						return inUse(ctx, c, snapshot, err)
					}
				}
				return env.Message(chosen, func() string { return "deleted\n" + snapshotsText(env, chosen) })
			})
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask for confirmation")
	return cmd
}

// inUse adds to an error the runs that started from a snapshot, which is refused because of them.
func inUse(ctx context.Context, c *client.Client, snapshot *snapshotv1.Snapshot, err error) error {
	refused, ok := rpcerr.From(err)
	if !ok || refused.Reason() != "SNAPSHOT_IN_USE" {
		return err
	}
	var started []string
	_, listed := paging.Some(0, record.LargestPage, func(size int, token string) (int, string, error) {
		page, err := c.Scheduler.ListRuns(ctx, &runv1.ListRunsRequest{PageSize: uint32(size), PageToken: token})
		for _, run := range page.GetRuns() {
			if run.GetFromSnapshot() == snapshot.GetSnapshotId() {
				started = append(started, run.GetRunId())
			}
		}
		return len(page.GetRuns()), page.GetNextPageToken(), err
	})
	if listed != nil || len(started) == 0 {
		return err
	}
	return refused.Fix("delete what started from it first: `rollout runs delete " + strings.Join(started, " ") + "`")
}

// confirm asks whether snapshots are to be deleted.
func confirm(env *cli.Env, yes bool, chosen *snapshotv1.ListSnapshotsResponse) error {
	if yes {
		return nil
	}
	if !env.Interactive || env.JSON() {
		return cli.Usage("snapshots would be deleted for good (%d); confirm with --yes", len(chosen.GetSnapshots()))
	}
	fmt.Fprintf(env.Stdout, "%sDelete for good? [y/N] ", snapshotsText(env, chosen))
	var answer string
	_, _ = fmt.Fscanln(env.Stdin, &answer)
	if answer = strings.ToLower(answer); answer != "y" && answer != "yes" {
		return exit.New(exit.Interrupted, "", "nothing was deleted")
	}
	return nil
}
