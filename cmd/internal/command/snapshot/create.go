package snapshot

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// kinds are the kinds of snapshots in the order in which they are taken.
var kinds = []snapshotv1.SnapshotKind{
	snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE,
	snapshotv1.SnapshotKind_SNAPSHOT_KIND_BUFFER,
	snapshotv1.SnapshotKind_SNAPSHOT_KIND_EPISODIC,
	snapshotv1.SnapshotKind_SNAPSHOT_KIND_PROCESS, // the last one, which `--all` leaves out: few hosts can
}

// nameRule is what the contract permits.
var nameRule = regexp.MustCompile(`^([a-z0-9][a-z0-9._-]*)?$`)

func createCommand(env *cli.Env) *cobra.Command {
	var wanted []string
	var name string
	var all bool
	cmd := &cobra.Command{
		Use:   "create RUN",
		Short: "Take snapshots of a run while it trains",
		Long: "Take snapshots of a run while it trains, all at the next committed step. The run commits no step until they exist, and then continues.\n\n" +
			"  train_state  weights, optimizer, schedule, random states, and the position in the data\n" +
			"  buffer       the same, and the samples that no step has consumed: a restored run leases the same next batch\n" +
			"  episodic     the same, and the open episodes after their last completed turn: a restored run continues them; the environment needs\n" +
			"               `state_dict` and `load_state_dict`\n" +
			"  process      the first, and the processes of its environments on the host of the control plane, which `rollout process restore`\n" +
			"               continues; needs CRIU, see `rollout doctor`\n\n" +
			"They are not deleted by `snapshot.keep`, which counts the snapshots that the run takes itself.",
		Example: "  rollout snapshot create addition-grpo\n  rollout snapshot create addition-grpo --kind train_state,buffer --name before-change\n  rollout snapshot create addition-grpo --all",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			asked, err := kindsOf(wanted, all)
			if err != nil {
				return err
			}
			if !nameRule.MatchString(name) || len(name) > 100 {
				return cli.Usage("--name %s: a name has lower-case letters, digits, dots, hyphens, and underscores, begins with a letter or digit, and is at most 100 long", name)
			}
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
				if all {
					got, err := c.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: args[0]})
					if err != nil {
						return err
					}
					if !got.GetStatus().GetRun().GetPlan().GetSavesEpisodes() {
						asked = slices.DeleteFunc(slices.Clone(asked), func(k snapshotv1.SnapshotKind) bool { return k == snapshotv1.SnapshotKind_SNAPSHOT_KIND_EPISODIC })
					}
				}
				response, err := c.Snapshot.TakeSnapshots(ctx, &snapshotv1.TakeSnapshotsRequest{RunId: args[0], Kinds: asked, Name: name})
				if err != nil {
					return err
				}
				return env.Message(response, func() string {
					return snapshotsText(env, &snapshotv1.ListSnapshotsResponse{Snapshots: response.GetSnapshots()})
				})
			})
		},
	}
	cmd.Flags().StringSliceVar(&wanted, "kind", nil, "`kinds` to take, separated by commas: "+names()+" (default train_state)")
	cmd.Flags().BoolVar(&all, "all", false, "take every kind except process, and episodic only if the environment saves episodes")
	cmd.Flags().StringVar(&name, "name", "manual", "`name` of the snapshots: a second request at the same step with the same name returns the first ones")
	return cmd
}

func names() string {
	var out []string
	for _, kind := range kinds {
		out = append(out, kindName(kind))
	}
	return strings.Join(out, ", ")
}

// kindsOf returns the kinds that the flags name, each once.
func kindsOf(wanted []string, all bool) ([]snapshotv1.SnapshotKind, error) {
	if all && len(wanted) > 0 {
		return nil, cli.Usage("--all takes every kind except process: leave --kind out")
	}
	if all {
		return kinds[:len(kinds)-1], nil
	}
	if len(wanted) == 0 {
		return kinds[:1], nil
	}
	asked := map[string]bool{}
	for _, name := range wanted {
		asked[name] = true
	}
	var out []snapshotv1.SnapshotKind
	for _, kind := range kinds {
		if asked[kindName(kind)] {
			out = append(out, kind)
			delete(asked, kindName(kind))
		}
	}
	for name := range asked {
		return nil, cli.Usage("--kind %s: there is no such kind; use %s", name, names())
	}
	return out, nil
}

func verifyCommand(env *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use:   "verify SNAPSHOT",
		Short: "Read every byte of a snapshot and report damage",
		Long: "Read every byte of a snapshot and report damage by file and offset. SNAPSHOT is its id, or a unique prefix of the id.\n\n" +
			"Exits with code 65 if the snapshot is damaged.",
		Example: "  rollout snapshot verify snap-01kapq5q5m",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
				response, err := c.Snapshot.VerifySnapshot(ctx, &snapshotv1.VerifySnapshotRequest{SnapshotId: args[0]})
				if err != nil {
					return err
				}
				snapshot, flaws := response.GetSnapshot(), response.GetFlaws()
				if err := env.Message(response, func() string { return flawsText(env, snapshot, flaws) }); err != nil || len(flaws) == 0 {
					return err
				}
				return exit.New(exit.Data, "restore another one of `rollout snapshot list "+snapshot.GetRunId()+"`, or import an exported copy after `rollout snapshot delete "+snapshot.GetSnapshotId()+"`",
					"snapshot %s is damaged in %s", snapshot.GetSnapshotId(), output.Plural(len(flaws), "place"))
			})
		},
	}
}

func flawsText(env *cli.Env, snapshot *snapshotv1.Snapshot, flaws []*snapshotv1.SnapshotFlaw) string {
	if len(flaws) == 0 {
		return fmt.Sprintf("%s is intact: %d files, %s\n", snapshot.GetSnapshotId(), len(snapshot.GetFiles()), output.Bytes(snapshot.GetBytes()))
	}
	s := env.Style()
	var table output.Table
	table.Row(s.Bold("FILE"), s.Bold("OFFSET"), s.Bold("PROBLEM"))
	for _, flaw := range flaws {
		table.Row(flaw.GetPath(), output.Count(flaw.GetOffset()), flaw.GetMessage())
	}
	return table.String()
}
