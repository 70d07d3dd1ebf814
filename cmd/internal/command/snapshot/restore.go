package snapshot

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/command/run"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/id"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

func restoreCommand(env *cli.Env) *cobra.Command {
	var detach, acceptChanges bool
	var set []string
	cmd := &cobra.Command{
		Use:     "restore SNAPSHOT",
		Aliases: []string{"fork"},
		Short:   "Start a new run from a snapshot and watch it",
		Long: "Start a new run from a snapshot and watch it. The run of the snapshot is not changed.\n\n" +
			"The new run has the plan of the old one. With --set it gets a new plan with other settings, which may not change what the training\n" +
			"state depends on, such as the model. If its inputs have changed, the changes are listed and no run is started; with --accept-changes\n" +
			"the new run gets a new plan with the current inputs.",
		Example: `  rollout snapshot restore snap-01kapq5q5m
  rollout snapshot restore snap-01kapq5q5m --detach
  rollout snapshot restore snap-01kapq5q5m --set train.steps=200 --set train.learning_rate=1e-6
  rollout snapshot restore snap-01kapq5q5m --accept-changes`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var restored *runv1.Run
			err := env.Plane.With(cmd, func(ctx context.Context, c *client.Client) (err error) {
				got, err := c.Snapshot.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: args[0]})
				if err != nil {
					return err
				}
				if len(set) == 0 {
					response, err := c.Snapshot.RestoreSnapshot(ctx, &snapshotv1.RestoreSnapshotRequest{SnapshotId: got.GetSnapshot().GetSnapshotId()})
					if restored = response.GetRun(); !acceptChanges || !run.InputsChanged(err) {
						return err
					}
				}
				old, err := originOf(ctx, c, got.GetSnapshot())
				if err == nil && !acceptChanges {
					err = unchanged(ctx, c, old)
				}
				if err == nil {
					restored, err = run.Fork(ctx, env, c, old, got.GetSnapshot(), set...)
				}
				return err
			})
			if err != nil {
				return err
			}
			if detach {
				return env.Message(restored, func() string { return restored.GetRunId() + "\n" })
			}
			c, err := env.Plane.Connect(cmd.Context(), true)
			if err != nil {
				return err
			}
			defer c.Close()
			return run.Watch(cmd.Context(), env, c, restored.GetRunId(), true)
		},
	}
	cmd.Flags().BoolVar(&acceptChanges, "accept-changes", false, "if inputs have changed, use the current ones")
	cmd.Flags().BoolVarP(&detach, "detach", "d", false, "print the id of the new run and exit")
	cmd.Flags().StringArrayVar(&set, "set", nil, "override a key of the configuration: `KEY=VALUE` (repeatable)")
	return cmd
}

// originOf returns what is known of the run of a snapshot. The run of an imported one is not here.
func originOf(ctx context.Context, c *client.Client, s *snapshotv1.Snapshot) (*runv1.Run, error) {
	if o := s.GetOrigin(); o != nil {
		return &runv1.Run{RunId: s.GetRunId(), Plan: o.GetPlan(), BaseDir: o.GetBaseDir(), Step: s.GetStep()}, nil
	}
	got, err := c.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: s.GetRunId()})
	return got.GetStatus().GetRun(), err
}

// unchanged returns an error if the inputs of a run are not those of its plan.
func unchanged(ctx context.Context, c *client.Client, old *runv1.Run) error {
	lock, err := id.CanonicalJSON(old.GetPlan())
	if err != nil {
		return err
	}
	request := &planv1.VerifyPlanRequest{Lock: lock, File: "plan.lock", BaseDir: old.GetBaseDir()}
	if old.GetDirectory() != "" { // the run is not imported
		request.InputsDirectory = string(planformat.InputsOf(old.GetDirectory()))
	}
	verified, err := c.Planner.VerifyPlan(ctx, request)
	if err != nil || len(verified.GetProblems()) == 0 {
		return err
	}
	var changes []string
	for _, p := range verified.GetProblems() {
		changes = append(changes, strings.TrimPrefix(p.GetFile()+": "+p.GetMessage(), ": "))
	}
	return &exit.Error{Code: exit.Data, Reason: "PLAN_INPUTS_CHANGED", Fix: "restore them, or start the new run with the current ones: add --accept-changes",
		Err: fmt.Errorf("inputs have changed since run %s was planned:\n   %s", old.GetRunId(), strings.Join(changes, "\n   "))}
}
