// Package run has the commands `rollout run` and `rollout train`.
package run

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/command/plan"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/problem"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/cmd/internal/report"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/refusal"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// runFlags are the flags of `rollout run`.
type runFlags struct {
	cli.ConfigFlags
	plan, baseDir, resume, from, project string
	acceptChanges, keepStep              bool
	detach, noReport                     bool
	dataOnly                             bool // refuse algorithms that sample
}

// Command returns `rollout run`.
func Command(env *cli.Env) *cobra.Command {
	var flags runFlags
	cmd := &cobra.Command{
		Use:   "run (--config FILE | --plan FILE | --resume RUN)",
		Short: "Start or resume a run and watch it",
		Long: `Start a run from a configuration or a plan, or resume a run, and watch it until it ends or is paused by a rejected
gradient or the health check. A plan is verified first: if an input has changed since it was made, the run is not started and the changed inputs are listed.

--resume continues a run that was interrupted, cancelled or has failed. For a finished run it shows the result. The inputs of a
run are fixed: if one has changed (the reward was fixed, for example), --resume lists the changes and exits. With
--accept-changes it starts a new run from the newest snapshot of the old one, with the current inputs.

--from starts a new run at step 0 with the weights of a snapshot: the usual way from SFT to GRPO. Optimizer, schedule, and
position in the data are new, and the weights are the initial model of a KL term. --from with --continue continues the whole
training state with another configuration or plan, such as more steps or another learning rate.

The first Ctrl-C stops the run after the current step, the second stops it immediately. With --detach the command exits and the
run continues; watch it with rollout logs tail, rollout runs show or rollout status.`,
		Example: `  rollout run --config grpo.toml
  rollout run --config grpo.toml --set train.steps=100
  rollout run --plan plan.lock
  rollout run --plan plan.lock --detach
  rollout run --resume run-01kapq3n8jz3gq5p1cs0e8q0vd
  rollout run --resume addition-grpo --accept-changes
  rollout run --config grpo.toml --from addition-sft
  rollout run --config longer.toml --from addition-grpo --continue`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(flags.Set) > 0 && flags.File == "" {
				return cli.Usage("--set requires --config: a plan and a run cannot be changed")
			}
			if flags.acceptChanges && flags.resume == "" {
				return cli.Usage("--accept-changes requires --resume: a new run uses the current inputs")
			}
			if flags.from != "" && flags.resume != "" {
				return cli.Usage("--from requires --config or --plan: --resume continues from the run's own state")
			}
			return execute(env, cmd, &flags)
		},
	}
	flags.addRunFlags(cmd)
	return cmd
}

// addRunFlags gives a command that starts runs its flags.
func (flags *runFlags) addRunFlags(cmd *cobra.Command) {
	flags.AddTo(cmd)
	cmd.Flags().StringVarP(&flags.plan, "plan", "p", "", "plan `file` written by rollout plan")
	cmd.Flags().StringVar(&flags.baseDir, "base-dir", "", "`folder` to which the paths of the plan are relative (default: the folder of the plan)")
	cmd.Flags().StringVarP(&flags.resume, "resume", "r", "", "`run` to resume: its id, a unique prefix of the id, or a name")
	cmd.Flags().BoolVar(&flags.acceptChanges, "accept-changes", false, "with --resume: if inputs have changed, continue in a new run with the current inputs")
	cmd.Flags().StringVar(&flags.from, "from", "", "`snapshot` whose weights the run starts with, or a run, which stands for its newest snapshot")
	cmd.Flags().BoolVar(&flags.keepStep, "continue", false, "with --from: continue the whole training state: step, optimizer, schedule, and position in the data")
	cmd.Flags().StringVar(&flags.project, "project", "", "`project` of the run (default: that of the API key, else the default project)")
	cmd.Flags().BoolVarP(&flags.detach, "detach", "d", false, "print the id of the run and exit")
	cmd.Flags().BoolVar(&flags.noReport, "no-report", false, "do not write a report at the end")
	cmd.MarkFlagsMutuallyExclusive("config", "plan", "resume")
	cmd.MarkFlagsOneRequired("config", "plan", "resume")
	_ = cmd.MarkFlagFilename("plan", "lock")
	_ = cmd.MarkFlagDirname("base-dir")
}

func execute(env *cli.Env, cmd *cobra.Command, flags *runFlags) error {
	if len(flags.Set) > 0 && flags.File == "" {
		return cli.Usage("--set requires --config: a plan and a run cannot be changed")
	}
	if flags.keepStep && flags.from == "" {
		return cli.Usage("--continue requires --from: a run without a snapshot starts at step 0")
	}
	if flags.from != "" && flags.plan != "" && !flags.keepStep {
		return cli.Usage("--from with --plan requires --continue: a plan names its model; with --config the run starts at step 0 with the weights of the snapshot")
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	c, err := env.Plane.Connect(ctx, true)
	if err != nil {
		stop()
		return err
	}
	defer c.Close()
	run, err := start(ctx, env, c, flags)
	stop() // Watch handles interrupts
	if err != nil {
		return err
	}
	if flags.detach {
		return env.Message(run, func() string { return run.GetRunId() + "\n" })
	}
	return Watch(cmd.Context(), env, c, run.GetRunId(), !flags.noReport)
}

// start creates or resumes the run.
func start(ctx context.Context, env *cli.Env, c *client.Client, flags *runFlags) (*runv1.Run, error) {
	switch {
	case flags.resume != "":
		return resume(ctx, env, c, flags)
	case flags.plan != "":
		return startPlan(ctx, env, c, flags)
	}
	source, err := flags.Source()
	if err != nil {
		return nil, err
	}
	from, err := startingPoint(ctx, c, flags.from)
	if err != nil {
		return nil, err
	}
	if from != nil && !flags.keepStep {
		if err := startWith(ctx, env, c, source, from); err != nil {
			return nil, err
		}
		from = nil
	}
	planned, err := plan.Create(ctx, env, c, source)
	if err != nil {
		return nil, err
	}
	if err := flags.fits(planned.GetPlan()); err != nil {
		return nil, err
	}
	return create(ctx, c, flags.project, planned.GetLock(), source.GetBaseDir(), from.GetSnapshotId())
}

// resume resumes a run. A finished run is returned unchanged: watching it shows its result.
func resume(ctx context.Context, env *cli.Env, c *client.Client, flags *runFlags) (*runv1.Run, error) {
	got, err := c.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: flags.resume})
	if err != nil {
		return nil, err
	}
	run := got.GetStatus().GetRun()
	if run.GetState() == runv1.RunState_RUN_STATE_SUCCEEDED {
		env.Note("%s", Finished(run))
		return run, nil
	}
	response, err := c.Scheduler.ResumeRun(ctx, &runv1.ResumeRunRequest{RunId: run.GetRunId()})
	if !flags.acceptChanges || !InputsChanged(err) {
		return response.GetRun(), err
	}
	from, err := newest(ctx, c, run)
	if err != nil {
		return nil, err
	}
	return Fork(ctx, env, c, run, from)
}

// Finished returns a message about a finished run: where its weights are, and how to train further.
func Finished(run *runv1.Run) string {
	text := fmt.Sprintf("%s %s is finished: it has made all %s steps", run.GetName(), run.GetRunId(), output.Count(run.GetTotalSteps()))
	if run.GetReason() == refusal.StoppedByGate {
		text = fmt.Sprintf("%s %s is finished: it was stopped by %s", run.GetName(), run.GetRunId(), run.GetMessage())
	}
	if run.GetWeightsDirectory() != "" {
		text += "; its weights are in " + run.GetWeightsDirectory()
	}
	return text + "\nto train further, raise `train.steps` or `train.epochs` and run: rollout run --config FILE --from " + run.GetRunId() + " --continue"
}

func startPlan(ctx context.Context, env *cli.Env, c *client.Client, flags *runFlags) (*runv1.Run, error) {
	if filepath.Ext(flags.plan) == ".toml" {
		return nil, exit.New(exit.Usage, fmt.Sprintf("write `rollout run --config %s`", flags.plan), "--plan %s: a configuration is not a plan", flags.plan)
	}
	lock, err := cli.ReadFile(flags.plan, "plan")
	if err != nil {
		return nil, err
	}
	folder := flags.baseDir
	if folder == "" {
		folder = filepath.Dir(flags.plan)
	}
	if folder, err = filepath.Abs(folder); err != nil {
		return nil, err
	}
	response, err := c.Planner.VerifyPlan(ctx, &planv1.VerifyPlanRequest{Lock: lock, File: flags.plan, BaseDir: folder})
	if err != nil {
		return nil, err
	}
	if len(response.GetProblems()) > 0 {
		err := env.Message(response, func() string { return problem.Render(response.GetProblems(), env.Style()) })
		return nil, errors.Join(err, problem.Exit(response.GetProblems()))
	}
	from, err := startingPoint(ctx, c, flags.from)
	if err != nil {
		return nil, err
	}
	return create(ctx, c, flags.project, lock, folder, from.GetSnapshotId())
}

// create creates a run; from is the snapshot to start from, or "".
func create(ctx context.Context, c *client.Client, project string, lock []byte, folder, from string) (*runv1.Run, error) {
	response, err := c.Scheduler.CreateRun(ctx, &runv1.CreateRunRequest{
		Lock: lock, BaseDir: folder, IdempotencyKey: ulid.Make().String(), FromSnapshot: from, Project: project,
	})
	return response.GetRun(), err
}

// Watch shows a run until it is over, then its summary.
func Watch(ctx context.Context, env *cli.Env, c *client.Client, runID string, withReport bool) error {
	interrupts, release := env.Signals()
	defer release()
	watcher := &live.Watcher{
		Client: c, RunID: runID, Out: env.Stdout, In: env.Stdin, Terminal: env.Terminal, JSON: env.JSON(),
		Style: env.Style(), Zone: env.Zone, Interrupts: interrupts,
	}
	outcome, err := watcher.Watch(ctx)
	if err != nil {
		return err
	}
	run := outcome.Run.Status.GetRun()
	if outcome.Detached {
		env.Note("the run continues; watch it with `rollout logs tail %s`, stop it with `rollout runs cancel %s`", runID, runID)
		if outcome.Stopped {
			return exit.Silent(exit.Interrupted)
		}
		return nil
	}
	var paths live.Paths
	if withReport && run.GetState() != runv1.RunState_RUN_STATE_INTERRUPTED { // its server is shutting down
		paths = writeReport(ctx, env, c, run)
	}
	if err := summary(env, outcome.Run, paths); err != nil {
		return err
	}
	return stateExit(run.GetState(), outcome.Stopped)
}

// writeReport writes a report into the run's folder. A failure is printed as a note.
func writeReport(ctx context.Context, env *cli.Env, c *client.Client, run *runv1.Run) live.Paths {
	folder := filepath.Join(run.GetDirectory(), "report")
	if info, err := os.Stat(run.GetDirectory()); run.GetDirectory() == "" || err != nil || !info.IsDir() {
		env.Note("the folder of the run is on another machine; write a report here with `rollout report %s --out FOLDER`", run.GetRunId())
		return live.Paths{}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	data, err := report.Gather(ctx, record.Services{Client: c}, run.GetRunId())
	if err == nil {
		var paths live.Paths
		if paths, err = data.Write(folder); err == nil {
			return paths
		}
	}
	env.Note("no report was written: %v", exit.From(err))
	return live.Paths{}
}

func summary(env *cli.Env, r *live.Run, paths live.Paths) error {
	if !env.JSON() {
		_, err := fmt.Fprint(env.Stdout, r.Summary(env.Style(), paths))
		return err
	}
	if err := output.Line(env.Stdout, "run", r.Status.GetRun()); err != nil {
		return err
	}
	if paths.PNG == "" {
		return nil
	}
	_, err := fmt.Fprintf(env.Stdout, "{\"report\":{\"png\":%q,\"html\":%q}}\n", paths.PNG, paths.HTML)
	return err
}

// stateExit returns the exit code for the final state of a run.
func stateExit(state runv1.RunState, stopped bool) error {
	switch {
	case state == runv1.RunState_RUN_STATE_SUCCEEDED:
		return nil
	case state == runv1.RunState_RUN_STATE_CANCELLED || stopped:
		return exit.Silent(exit.Interrupted)
	case state == runv1.RunState_RUN_STATE_INTERRUPTED:
		return exit.Silent(exit.Unavailable)
	}
	return exit.Silent(exit.Software)
}
