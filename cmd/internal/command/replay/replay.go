// Package replay has the command `rollout replay`.
package replay

import (
	auditcommand "github.com/rollout-rl/rollout/cmd/internal/command/audit"

	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/audit"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/replay"
)

// Command returns `rollout replay`.
func Command(env *cli.Env) *cobra.Command {
	var configured string
	var worker cli.WorkerFlag
	threads := -1
	cmd := &cobra.Command{
		Use:   "replay RUN",
		Short: "Train the recorded batches of a run again and compare weights",
		Long: `Train the recorded batches of a run again, in order, and compare the weights of every step with the recorded ones. This reproduces an
asynchronous run: the ledger records the samples and the order in which they were consumed.

The command reads segments on this host, or in the bucket of a rolloutd.toml (--config). It begins with the run's model, or with the
oldest snapshot after which all samples still exist; ` + "`snapshot.keep_payloads = true`" + ` keeps all samples of a run. It stops at the first step
with other weights, with exit code 65. ` + cli.RunHelp,
		Example: `  rollout replay addition-grpo
  rollout replay addition-grpo --format json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			job := &replay.Job{Threads: threads, Worker: worker.Command(), Log: env.Stderr}
			scratch, err := os.MkdirTemp("", "rollout-replay-")
			if err != nil {
				return exit.New(exit.CannotMake, "", "make a temporary folder: %w", err)
			}
			defer func() { _ = os.RemoveAll(scratch) }()
			job.Scratch = scratch
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return auditcommand.Gather(env, cmd, args[0], configured, false, func(e *audit.Evidence, files replay.Files) error {
				job.Evidence, job.Files = e, files // the worker verifies the files that it reads
				return execute(ctx, env, job)
			})
		},
	}
	auditcommand.ConfigFlag(cmd, &configured)
	worker.AddTo(cmd)
	cmd.Flags().IntVar(&threads, "threads", -1, "threads of the learner; 0: all cores; results depend on it (default: the threads of the run's learner)")
	return cmd
}

func execute(ctx context.Context, env *cli.Env, job *replay.Job) error {
	var steps []replay.Step
	err := job.Run(ctx, func(s replay.Step) {
		steps = append(steps, s)
		if env.JSON() {
			return
		}
		switch {
		case s.Recorded == "":
			fmt.Fprintf(env.Stdout, "step %-6d %s (the run recorded no digest of it)\n", s.Step, s.Replayed)
			return
		case s.Same():
			fmt.Fprintf(env.Stdout, "step %-6d %s\n", s.Step, s.Replayed)
			return
		}
		fmt.Fprintf(env.Stdout, "step %-6d %s differs from the recorded %s\n", s.Step, env.Style().Red(s.Replayed), s.Recorded)
	})
	if err != nil {
		return err
	}
	same := len(steps) > 0
	for _, s := range steps {
		same = same && s.Same()
	}
	if env.JSON() {
		err = output.Value(env.Stdout, map[string]any{"run_id": job.Evidence.Run.GetRunId(), "same": same, "steps": steps})
	} else if same {
		_, err = fmt.Fprintf(env.Stdout, "%s: %d steps reproduced the recorded weights\n", env.Style().Green("equal"), len(steps)-1)
	}
	if err == nil && !same {
		err = exit.Silent(exit.Data)
	}
	return err
}
