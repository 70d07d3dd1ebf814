package runs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// deletable are the states of runs that can be deleted.
var deletable = []runv1.RunState{
	runv1.RunState_RUN_STATE_SUCCEEDED, runv1.RunState_RUN_STATE_FAILED, runv1.RunState_RUN_STATE_CANCELLED, runv1.RunState_RUN_STATE_INTERRUPTED,
	runv1.RunState_RUN_STATE_DELETING,
}

type deleteFlags struct {
	olderThan   string
	states      []string
	project     *string
	dryRun, yes bool
}

func deleteCommand(env *cli.Env) *cobra.Command {
	var flags deleteFlags
	var project string
	cmd := &cobra.Command{
		Use:   "delete [RUN...]",
		Short: "Delete runs with everything that is stored of them",
		Long: "Delete runs that have ended with everything that is stored of them: ledger, samples, events, metrics, sessions, snapshots, weights, and logs.\n" +
			"Without RUN, --older-than, --state and --project select runs. Snapshots that other runs started from stay until those runs are deleted.\n\n" + cli.RunHelp,
		Example: `  rollout runs delete addition-grpo
  rollout runs delete --state failed,cancelled --older-than 7d --dry-run
  rollout runs delete --older-than 30d --yes
  rollout runs delete --project math --state failed`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("project") {
				flags.project = &project
			}
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
				return flags.run(ctx, env, c.Scheduler, args)
			})
		},
	}
	cmd.Flags().StringVar(&flags.olderThan, "older-than", "", "only runs that ended at least this `time` ago, such as 30d or 12h")
	cmd.Flags().StringSliceVar(&flags.states, "state", nil, "only runs in these `states`, for example failed,cancelled")
	cmd.Flags().StringVar(&project, "project", "", "only runs of this `project`; \"\": of the default project")
	cmd.Flags().BoolVar(&flags.dryRun, "dry-run", false, "list what would be deleted, and delete nothing")
	cmd.Flags().BoolVarP(&flags.yes, "yes", "y", false, "do not ask for confirmation")
	_ = cmd.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(stateNames(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// deletionResult is the outcome for one run.
type deletionResult struct {
	RunID         string   `json:"run_id"`
	Name          string   `json:"name"`
	State         string   `json:"state"`
	KeptSnapshots []string `json:"kept_snapshots"`
	Reason        string   `json:"reason,omitempty"`  // why it was not deleted
	Message       string   `json:"message,omitempty"` // the same for people
}

func (f *deleteFlags) run(ctx context.Context, env *cli.Env, c runv1.SchedulerServiceClient, args []string) error {
	runs, err := f.selected(ctx, env.Now(), c, args)
	if err != nil {
		return err
	}
	var checked, refused []deletionResult
	for _, run := range runs {
		result, err := deleteOne(ctx, c, run, true)
		switch {
		case err != nil && len(args) > 0:
			return err
		case err != nil && result.Reason == "":
			return err
		case err != nil:
			refused = append(refused, result)
		default:
			checked = append(checked, result)
		}
	}
	if f.dryRun || len(checked) == 0 {
		return f.print(env, "would be deleted", checked, refused)
	}
	if err := f.confirm(env, checked); err != nil {
		return err
	}
	var deleted []deletionResult
	var failed error
	for _, each := range checked {
		result, err := deleteOne(ctx, c, &runv1.Run{RunId: each.RunID, Name: each.Name}, false)
		if err != nil {
			failed = errors.Join(failed, err)
			refused = append(refused, result)
			continue
		}
		deleted = append(deleted, result)
	}
	if err := f.print(env, "deleted", deleted, refused); err != nil {
		return err
	}
	return failed
}

// selected returns the runs that the command line names.
func (f *deleteFlags) selected(ctx context.Context, now time.Time, c runv1.SchedulerServiceClient, args []string) (runs []*runv1.Run, err error) {
	states, err := statesOf(f.states)
	if err != nil {
		return nil, err
	}
	age, err := ageOf(f.olderThan)
	if err != nil {
		return nil, err
	}
	switch {
	case len(args) > 0 && (len(states) > 0 || f.olderThan != "" || f.project != nil):
		return nil, cli.Usage("give runs, or --older-than, --state and --project, not both")
	case len(args) == 0 && len(states) == 0 && f.olderThan == "" && f.project == nil:
		return nil, cli.Usage("no run is selected: give runs, or --older-than, --state or --project")
	}
	for _, name := range args {
		got, err := c.GetRun(ctx, &runv1.GetRunRequest{RunId: name})
		if err != nil {
			return nil, err
		}
		runs = append(runs, got.GetStatus().GetRun())
	}
	if len(args) > 0 {
		return runs, nil
	}
	if len(states) == 0 {
		states = deletable
	}
	return runs, paging.All(func(token string) (string, error) {
		page, err := c.ListRuns(ctx, &runv1.ListRunsRequest{States: states, Project: f.project, PageSize: record.LargestPage, PageToken: token})
		for _, run := range page.GetRuns() {
			ended := run.GetEndTime()
			if ended == nil { // of an interrupted run
				ended = run.GetCreateTime()
			}
			if now.Sub(ended.AsTime()) >= age {
				runs = append(runs, run)
			}
		}
		return page.GetNextPageToken(), err
	})
}

// ageOf parses a duration with days, such as 30d or 12h.
func ageOf(text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	if days, ok := strings.CutSuffix(text, "d"); ok {
		if n, err := strconv.ParseFloat(days, 64); err == nil && n >= 0 && n < 1e5 {
			return time.Duration(n * 24 * float64(time.Hour)), nil
		}
	}
	age, err := time.ParseDuration(text)
	if err != nil || age < 0 {
		return 0, cli.Usage("invalid argument %q for --older-than: must be a duration such as 30d or 12h", text)
	}
	return age, nil
}

func deleteOne(ctx context.Context, c runv1.SchedulerServiceClient, run *runv1.Run, dry bool) (deletionResult, error) {
	response, err := c.DeleteRun(ctx, &runv1.DeleteRunRequest{RunId: run.GetRunId(), DryRun: dry})
	if err == nil {
		run = response.GetRun()
	}
	result := deletionResult{RunID: run.GetRunId(), Name: run.GetName(), State: live.State(run.GetState()), KeptSnapshots: append([]string{}, response.GetKeptSnapshots()...)}
	if err != nil {
		result.Reason, result.Message = rpcerr.Reason(err), rpcerr.Text(err)
	}
	return result, err
}

// confirm asks whether the runs are to be deleted.
func (f *deleteFlags) confirm(env *cli.Env, runs []deletionResult) error {
	if f.yes {
		return nil
	}
	if !env.Interactive || env.JSON() {
		return cli.Usage("%s would be deleted for good; confirm with --yes, or list them with --dry-run", count(runs))
	}
	fmt.Fprintf(env.Stdout, "%sDelete %s for good? [y/N] ", table(env, runs), count(runs))
	var answer string
	_, _ = fmt.Fscanln(env.Stdin, &answer)
	if answer = strings.ToLower(answer); answer != "y" && answer != "yes" {
		return exit.New(exit.Interrupted, "", "nothing was deleted")
	}
	return nil
}

func count(runs []deletionResult) string {
	if len(runs) == 1 {
		return "1 run"
	}
	return output.Count(uint64(len(runs))) + " runs"
}

func (f *deleteFlags) print(env *cli.Env, done string, runs, refused []deletionResult) error {
	if env.JSON() {
		return output.Value(env.Stdout, map[string]any{
			"dry_run": f.dryRun, "runs": append([]deletionResult{}, runs...), "refused": append([]deletionResult{}, refused...),
		})
	}
	text := "no run is selected\n"
	if len(runs) > 0 {
		text = fmt.Sprintf("%s %s\n%s", count(runs), done, table(env, runs))
	}
	for _, each := range refused {
		text += fmt.Sprintf("not deleted: %s (%s)\n", each.Message, each.Reason)
	}
	_, err := io.WriteString(env.Stdout, text)
	return err
}

func table(env *cli.Env, runs []deletionResult) string {
	s := env.Style()
	var t output.Table
	t.Row(s.Bold("RUN"), s.Bold("NAME"), s.Bold("STATE"), s.Bold("SNAPSHOTS THAT STAY"))
	for _, each := range runs {
		kept := "-"
		if len(each.KeptSnapshots) > 0 {
			kept = strings.Join(each.KeptSnapshots, ", ")
		}
		t.Row(each.RunID, each.Name, each.State, kept)
	}
	return t.String()
}
