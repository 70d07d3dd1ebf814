// Package snapshot has the commands `rollout snapshot ...`.
package snapshot

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/paging"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Command returns `rollout snapshot`.
func Command(env *cli.Env) *cobra.Command {
	cmd := cli.Group("snapshot", "Create, list, show, verify, restore, delete, extract, export, import and recover snapshots", createCommand(env), listCommand(env), showCommand(env), verifyCommand(env), restoreCommand(env), deleteCommand(env), extractCommand(env), exportCommand(env), importCommand(env), recoverCommand(env))
	cmd.Aliases = []string{"snapshots"}
	return cmd
}

func listCommand(env *cli.Env) *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use:     "list [RUN]",
		Short:   "List snapshots, newest first",
		Long:    "List snapshots, newest first.\n\n" + cli.FolderHelp,
		Example: "  rollout snapshot list\n  rollout snapshot list addition-grpo",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.Browse(cmd, func(ctx context.Context, r record.Reader) error {
				request := &snapshotv1.ListSnapshotsRequest{}
				if len(args) == 1 {
					got, err := r.Run(ctx, args[0])
					if err != nil {
						return err
					}
					request.RunId = got.GetRun().GetRunId()
				}
				response := &snapshotv1.ListSnapshotsResponse{}
				_, err := paging.Some(limit, record.LargestPage, func(size int, token string) (int, string, error) {
					request.PageSize, request.PageToken = uint32(size), token
					page, err := r.Snapshots(ctx, request)
					response.Snapshots, response.NextPageToken = append(response.Snapshots, page.GetSnapshots()...), page.GetNextPageToken()
					return len(page.GetSnapshots()), page.GetNextPageToken(), err
				})
				if err != nil {
					return err
				}
				return env.Message(response, func() string { return snapshotsText(env, response) })
			})
		},
	}
	cmd.Flags().IntVarP(&limit, "limit", "n", 20, "maximum `number` of snapshots; 0: all")
	return cmd
}

func snapshotsText(env *cli.Env, response *snapshotv1.ListSnapshotsResponse) string {
	if len(response.GetSnapshots()) == 0 {
		return "no snapshots\n"
	}
	s := env.Style()
	var table output.Table
	table.Row(s.Bold("SNAPSHOT"), s.Bold("RUN"), s.Bold("KIND"), s.Bold("NAME"), s.Bold("STEP"), s.Bold("SIZE"), s.Bold("CREATED"))
	for _, snapshot := range response.GetSnapshots() {
		table.Row(snapshot.GetSnapshotId(), snapshot.GetRunId(), kindName(snapshot.GetKind()), cmp.Or(snapshot.GetName(), "-"), output.Count(snapshot.GetStep()),
			output.Bytes(snapshot.GetBytes()), env.Time(snapshot.GetCreateTime().AsTime()))
	}
	return table.String() + output.More("snapshots", response.GetNextPageToken())
}

func kindName(kind snapshotv1.SnapshotKind) string {
	return strings.ToLower(strings.TrimPrefix(kind.String(), "SNAPSHOT_KIND_"))
}

func showCommand(env *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use:     "show SNAPSHOT",
		Short:   "Show the manifest of a snapshot",
		Long:    "Show the manifest of a snapshot. SNAPSHOT is its id, or a unique prefix of the id.\n\n" + cli.FolderHelp,
		Example: "  rollout snapshot show snap-01kapq5q5m",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.Browse(cmd, func(ctx context.Context, r record.Reader) error {
				snapshot, err := r.Snapshot(ctx, args[0])
				if err != nil {
					return err
				}
				return env.Message(snapshot, func() string { return snapshotText(env, snapshot) })
			})
		},
	}
}

func snapshotText(env *cli.Env, snapshot *snapshotv1.Snapshot) string {
	s := env.Style()
	var head, files output.Table
	head.Row("run", snapshot.GetRunId())
	head.Row("kind", kindName(snapshot.GetKind()))
	if name := snapshot.GetName(); name != "" {
		head.Row("name", name)
	}
	head.Row("step", output.Count(snapshot.GetStep()))
	head.Row("created", env.Time(snapshot.GetCreateTime().AsTime()))
	head.Row("weights", snapshot.GetWeightsDigest())
	head.Row("cursor", fmt.Sprintf("position %s (epoch %d, index %d of %s rows)", output.Count(snapshot.GetCursor().GetPosition()),
		snapshot.GetCursor().GetEpoch(), snapshot.GetCursor().GetIndex(), output.Count(snapshot.GetCursor().GetRows())))
	head.Row("plan", snapshot.GetPlanId())
	for _, file := range snapshot.GetFiles() {
		files.Row("  "+file.GetPath(), output.Bytes(file.GetBytes()), s.Dim(output.Short(file.GetDigest())))
	}
	return fmt.Sprintf("%s\n%s%d files, %s\n%s", s.Bold(snapshot.GetSnapshotId()), head.String(), len(snapshot.GetFiles()),
		output.Bytes(snapshot.GetBytes()), files.String())
}
