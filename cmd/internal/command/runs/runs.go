// Package runs has the commands `rollout runs ...`.
package runs

import (
	runcommand "github.com/rollout-rl/rollout/cmd/internal/command/run"
	"github.com/rollout-rl/rollout/libs/paging"

	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Command returns `rollout runs`.
func Command(env *cli.Env) *cobra.Command {
	return cli.Group("runs", "List, show, cancel, pause, resume and delete runs",
		listCommand(env), showCommand(env), cancelCommand(env), pauseCommand(env), resumeCommand(env), deleteCommand(env))
}

func listCommand(env *cli.Env) *cobra.Command {
	var states []string
	var limit int
	var project string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List runs, newest first",
		Long:  "List runs, newest first.\n\n" + cli.FolderHelp,
		Example: `  rollout runs list
  rollout runs list --state running,paused --format json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			request := &runv1.ListRunsRequest{}
			var err error
			if request.States, err = statesOf(states); err != nil {
				return err
			}
			if cmd.Flags().Changed("project") {
				request.Project = &project
			}
			return env.Plane.Browse(cmd, func(ctx context.Context, r record.Reader) error {
				response := &runv1.ListRunsResponse{}
				_, err := paging.Some(limit, record.LargestPage, func(size int, token string) (int, string, error) {
					request.PageSize, request.PageToken = uint32(size), token
					page, err := r.Runs(ctx, request)
					response.Runs, response.NextPageToken = append(response.Runs, page.GetRuns()...), page.GetNextPageToken()
					return len(page.GetRuns()), page.GetNextPageToken(), err
				})
				if err != nil {
					return err
				}
				return env.Message(response, func() string { return runsText(env, response, states) })
			})
		},
	}
	cmd.Flags().StringSliceVar(&states, "state", nil, "only runs in these `states`, for example running,paused")
	cmd.Flags().StringVar(&project, "project", "", "only runs of this `project`; \"\": of the default project")
	cmd.Flags().IntVarP(&limit, "limit", "n", 20, "maximum `number` of runs; 0: all")
	_ = cmd.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(stateNames(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// statesOf returns the states that --state names.
func statesOf(names []string) (states []runv1.RunState, err error) {
	for _, name := range names {
		state, ok := runv1.RunState_value["RUN_STATE_"+strings.ToUpper(name)]
		if !ok || state == 0 {
			return nil, cli.Usage("invalid argument %q for --state: must be one of %s", name, strings.Join(stateNames(), ", "))
		}
		states = append(states, runv1.RunState(state))
	}
	return states, nil
}

func stateNames() []string {
	var names []string
	for i := int32(1); runv1.RunState_name[i] != ""; i++ {
		names = append(names, strings.ToLower(live.State(runv1.RunState(i))))
	}
	return names
}

func runsText(env *cli.Env, response *runv1.ListRunsResponse, states []string) string {
	if len(response.GetRuns()) == 0 && len(states) > 0 {
		return "no run is " + strings.Join(states, " or ") + "; list all with `rollout runs list`\n"
	}
	if len(response.GetRuns()) == 0 {
		return "no runs; start one with `rollout run --config FILE`\n"
	}
	s := env.Style()
	var table output.Table
	table.Row(s.Bold("RUN"), s.Bold("NAME"), s.Bold("STATE"), s.Bold("STEP"), s.Bold("CREATED"))
	for _, run := range response.GetRuns() {
		table.Row(run.GetRunId(), run.GetName(), live.State(run.GetState()),
			fmt.Sprintf("%s/%s", output.Count(run.GetStep()), output.Count(run.GetTotalSteps())), env.Time(run.GetCreateTime().AsTime()))
	}
	return table.String() + output.More("runs", response.GetNextPageToken())
}

func showCommand(env *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use:     "show RUN",
		Short:   "Show the state, progress, rewards, queues and workers of a run",
		Long:    "Show the state, progress, rewards, queues and workers of a run. " + cli.RunHelp + "\n\n" + cli.FolderHelp,
		Example: "  rollout runs show addition-grpo",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.Browse(cmd, func(ctx context.Context, r record.Reader) error {
				status, err := r.Run(ctx, args[0])
				if err != nil {
					return err
				}
				shown, err := gather(ctx, r, status)
				if err != nil {
					return err
				}
				return env.Message(status, func() string { return runText(env, shown, origin(ctx, r, status.GetRun())) })
			})
		},
	}
}

// maxShown is the number of steps, and of evaluations, that are shown.
const maxShown = 200

// gather returns a run with its newest steps, evaluations, and collapses.
func gather(ctx context.Context, r record.Reader, status *runv1.RunStatus) (*live.Run, error) {
	shown := &live.Run{}
	shown.Update(status)
	for _, kind := range []string{"step.committed", "eval.finished", "health.collapse", "gate.no_metric", "lineage.forked"} {
		events, err := r.Events(ctx, &storagev1.EventFilter{RunId: status.GetRun().GetRunId(), Kinds: []string{kind}}, maxShown, true)
		if err != nil {
			return nil, err
		}
		for _, e := range events {
			shown.Add(e)
		}
	}
	return shown, nil
}

// origin names the snapshot that a run started from, with its step and run if the snapshot exists;
// "" if it began at step 0.
func origin(ctx context.Context, r record.Reader, run *runv1.Run) string {
	if run.GetFromSnapshot() == "" {
		return ""
	}
	from, err := r.Snapshot(ctx, run.GetFromSnapshot())
	if err != nil {
		return run.GetFromSnapshot()
	}
	return fmt.Sprintf("%s (step %s of %s)", from.GetSnapshotId(), output.Count(from.GetStep()), from.GetRunId())
}

func runText(env *cli.Env, r *live.Run, from string) string {
	run := r.Status.GetRun()
	text := r.View(env.Style(), 1000, env.Zone, "")
	var table output.Table
	add := func(name, value string) {
		if value != "" && value != "-" {
			table.Row(fmt.Sprintf("%-8s", name), value)
		}
	}
	if run.GetReason() != "" || run.GetMessage() != "" {
		add("reason", strings.TrimSpace(run.GetReason()+" "+strings.ReplaceAll(run.GetMessage(), "\n", "\n          ")))
	}
	add("created", env.Time(run.GetCreateTime().AsTime()))
	if run.GetEndTime() != nil {
		add("ended", env.Time(run.GetEndTime().AsTime()))
	}
	add("plan", run.GetPlan().GetPlanId())
	add("starts", fmt.Sprint(run.GetIncarnation()))
	add("from", from)
	add("folder", run.GetDirectory())
	add("weights", run.GetWeightsDirectory())
	add("digest", run.GetWeightsDigest())
	if r.Lineage != "" {
		add("lineage", r.Lineage+": weights were lost, and retraining gave other bits")
	}
	return text + table.String()
}

// change returns a command that changes the state of a run; done names the change in its output.
func change(env *cli.Env, cmd *cobra.Command, done string, call func(ctx context.Context, c runv1.SchedulerServiceClient, before *runv1.Run) (*runv1.Run, error)) *cobra.Command {
	cmd.Args = cobra.ExactArgs(1)
	cmd.Long = strings.Join(slices.DeleteFunc([]string{cmd.Short + ".", cmd.Long, cli.RunHelp}, func(s string) bool { return s == "" }), " ")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
			got, err := c.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: args[0]})
			if err != nil {
				return err
			}
			before := got.GetStatus().GetRun()
			run, err := call(ctx, c.Scheduler, before)
			if err != nil {
				return err
			}
			return env.Message(run, func() string { return changed(done, before.GetState(), run) })
		})
	}
	return cmd
}

// changed describes a change, or why there was nothing to change.
func changed(done string, before runv1.RunState, run *runv1.Run) string {
	name, state := run.GetName()+" "+run.GetRunId(), live.State(run.GetState())
	switch {
	case done == "resumed" && before == runv1.RunState_RUN_STATE_SUCCEEDED:
		return runcommand.Finished(run) + "\n"
	case done == "resumed" && !live.Ended(before) && before != runv1.RunState_RUN_STATE_PAUSED:
		return fmt.Sprintf("%s is already running; it is %s\n", name, state)
	case done == "cancelled" && live.Ended(before) && before != runv1.RunState_RUN_STATE_INTERRUPTED:
		return fmt.Sprintf("%s has already ended and is %s; there was nothing to cancel\n", name, state)
	case done == "cancelled" && !live.Ended(run.GetState()):
		return fmt.Sprintf("%s is being cancelled; it is still %s\n", name, state)
	}
	return fmt.Sprintf("%s %s; it is %s\n", done, name, state)
}

func cancelCommand(env *cli.Env) *cobra.Command {
	var now bool
	cmd := change(env, &cobra.Command{
		Use: "cancel RUN", Short: "Stop a run after the current step and take a snapshot", Aliases: []string{"stop"},
		Example: "  rollout runs cancel addition-grpo\n  rollout runs cancel addition-grpo --now",
	}, "cancelled", func(ctx context.Context, c runv1.SchedulerServiceClient, before *runv1.Run) (*runv1.Run, error) {
		response, err := c.CancelRun(ctx, &runv1.CancelRunRequest{RunId: before.GetRunId(), Drain: !now})
		return response.GetRun(), err
	})
	cmd.Flags().BoolVar(&now, "now", false, "stop immediately; the current step is lost")
	return cmd
}

func pauseCommand(env *cli.Env) *cobra.Command {
	return change(env, &cobra.Command{
		Use: "pause RUN", Short: "Stop issuing work; the workers keep running",
		Long:    "Steps whose work is already issued are finished. Continue with `rollout runs resume RUN`.",
		Example: "  rollout runs pause addition-grpo",
	},
		"paused", func(ctx context.Context, c runv1.SchedulerServiceClient, before *runv1.Run) (*runv1.Run, error) {
			response, err := c.PauseRun(ctx, &runv1.PauseRunRequest{RunId: before.GetRunId()})
			return response.GetRun(), err
		})
}

func resumeCommand(env *cli.Env) *cobra.Command {
	return change(env, &cobra.Command{
		Use: "resume RUN", Short: "Resume a paused, interrupted, failed or cancelled run without watching it",
		Example: "  rollout runs resume addition-grpo",
	}, "resumed", func(ctx context.Context, c runv1.SchedulerServiceClient, before *runv1.Run) (*runv1.Run, error) {
		if before.GetState() == runv1.RunState_RUN_STATE_SUCCEEDED {
			return before, nil
		}
		response, err := c.ResumeRun(ctx, &runv1.ResumeRunRequest{RunId: before.GetRunId()})
		return response.GetRun(), err
	})
}
