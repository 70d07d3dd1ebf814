package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/audit"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/exit"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/replay"
)

func (a *app) replayCommand() *cobra.Command {
	var worker, configured string
	threads := -1
	cmd := &cobra.Command{
		Use:   "replay RUN",
		Short: "Train a run's recorded batches again and compare the weights of every step",
		Long: `Train the batches that the ledger recorded again, in order, and compare the weights of every step with the recorded ones. That is how
an asynchronous run is repeated: what was sampled, and in which order it was consumed, stands in the ledger. It needs the
segments on this host or in a bucket that a rolloutd.toml (--config) names, and begins with the run's model, or with the oldest snapshot whose later samples are still there
(` + "`snapshot.keep_payloads = true`" + ` keeps them all). A step with other weights ends it, and the exit code is 65. ` + runArgument,
		Example: `  rollout replay addition-grpo
  rollout replay addition-grpo --format json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			job := &replay.Job{Threads: threads, Worker: strings.Fields(worker), Log: a.stderr}
			if len(job.Worker) == 0 {
				job.Worker = []string{findWorker()}
			}
			scratch, err := os.MkdirTemp("", "rollout-replay-")
			if err != nil {
				return exit.New(exit.CannotMake, "", "make a scratch folder: %w", err)
			}
			defer func() { _ = os.RemoveAll(scratch) }()
			job.Scratch = scratch
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return a.gather(cmd, args[0], configured, false, // it verifies what it reads
				func(e *audit.Evidence, place audit.Place) error {
					artifacts, err := place.CAS()
					if err != nil {
						return err
					}
					job.Evidence, job.Files = e, replay.Artifacts{CAS: artifacts}
					return a.replay(ctx, job)
				},
				func(e *audit.Evidence, c *client.Client) error {
					job.Evidence, job.Files = e, replay.Services{Client: c}
					return a.replay(ctx, job)
				})
		},
	}
	configuredFlag(cmd, &configured)
	cmd.Flags().StringVar(&worker, "worker", "", "`command` that starts a worker (default: rollout-worker beside rollout, or on PATH)")
	cmd.Flags().IntVar(&threads, "threads", -1, "threads of the learner, which bits depend on; 0: all cores (default: as the run's learner had)")
	return cmd
}

func (a *app) replay(ctx context.Context, job *replay.Job) error {
	var steps []replay.Step
	err := job.Run(ctx, func(s replay.Step) {
		steps = append(steps, s)
		if a.format == formatJSON {
			return
		}
		if s.Same() {
			fmt.Fprintf(a.stdout, "step %-6d %s\n", s.Step, s.Replayed)
			return
		}
		fmt.Fprintf(a.stdout, "step %-6d %s, recorded is %s\n", s.Step, a.style().Red(s.Replayed), s.Recorded)
	})
	if err != nil {
		return err
	}
	same := len(steps) > 0
	for _, s := range steps {
		same = same && s.Same()
	}
	if a.format == formatJSON {
		err = output.Value(a.stdout, map[string]any{"run_id": job.Evidence.Run.GetRunId(), "same": same, "steps": steps})
	} else if same {
		_, err = fmt.Fprintf(a.stdout, "%s: %d steps gave the recorded weights\n", a.style().Green("the same"), len(steps)-1)
	}
	if err == nil && !same {
		err = exit.Silent(exit.Data)
	}
	return err
}

// findWorker is rollout-worker beside this program, else what PATH has.
func findWorker() string {
	const name = "rollout-worker"
	if self, err := os.Executable(); err == nil {
		if real, err := filepath.EvalSymlinks(self); err == nil {
			self = real
		}
		if beside := filepath.Join(filepath.Dir(self), name); executable(beside) {
			return beside
		}
	}
	if found, err := exec.LookPath(name); err == nil {
		return found
	}
	return name // the start says that it is not there
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}
