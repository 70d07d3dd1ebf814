package export

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/cmd/internal/report"
	"github.com/rollout-rl/rollout/libs/exit"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// pushFlags are the flags of `rollout export push`.
type pushFlags struct {
	revision, message string
	public            bool
	part              partFlags
	worker            cli.WorkerFlag
}

func pushCommand(env *cli.Env) *cobra.Command {
	var flags pushFlags
	cmd := &cobra.Command{
		Use:   "push (RUN | SNAPSHOT) REPO",
		Short: "Push the weights of a snapshot to the Hugging Face Hub",
		Long: `Push the weights of a snapshot, or of the newest snapshot of a run, to a model repository of the Hugging Face Hub, with a model card
that has the run's id, digest, evaluations and settings. REPO is owner/name. The repository is created if it does not exist: private,
unless --public is set. Nothing is pushed to a public repository without --public.

The token is that of ` + "`hf auth login`" + `, or HF_TOKEN; HF_ENDPOINT names another hub. The upload runs in a worker with huggingface_hub.

` + cli.FolderHelp + " " + cli.RunHelp,
		Example: `  rollout export push addition-grpo me/addition-grpo
  rollout export push addition-grpo me/addition-grpo --revision step-400
  rollout export push snap-01kapq5q5m me/addition-adapter --adapter --public`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if offline := env.Getenv("HF_HUB_OFFLINE"); offline != "" && offline != "0" {
				return exit.New(exit.Unavailable, "unset HF_HUB_OFFLINE", "HF_HUB_OFFLINE=%s forbids calls of the hub", offline)
			}
			return env.Plane.Records(cmd, func(ctx context.Context, r record.Reader) error {
				snapshot, err := record.SnapshotOf(ctx, r, args[0])
				if err != nil {
					return err
				}
				data, err := report.Gather(ctx, r, snapshot.GetRunId())
				if err != nil {
					return err
				}
				return pushSnapshot(ctx, env, r, snapshot, data, args[1], &flags)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&flags.revision, "revision", "", "`branch` to push to, created if it does not exist (default: main)")
	f.StringVar(&flags.message, "message", "", "message of the commit (default: the run and its step)")
	f.BoolVar(&flags.public, "public", false, "create a public repository, or push to one")
	flags.part.addTo(cmd)
	flags.worker.AddTo(cmd)
	return cmd
}

// pushed is the answer of the worker.
type pushed struct {
	Event  string `json:"event"`
	Commit string `json:"commit"`
	URL    string `json:"url"`

	Code    int    `json:"code"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
	Fix     string `json:"fix"`
}

// pushSnapshot writes the weights and the card to a temporary folder, which a worker uploads.
func pushSnapshot(ctx context.Context, env *cli.Env, r record.Reader, snapshot *snapshotv1.Snapshot, data *report.Data, repository string, flags *pushFlags) error {
	scratch, err := os.MkdirTemp("", "rollout-push-")
	if err != nil {
		return exit.New(exit.CannotMake, "set TMPDIR to a folder with space for the weights", "make a temporary folder: %w", err)
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	part, folder := flags.part.name(), filepath.Join(scratch, "model")
	digest, err := writePart(ctx, env, record.Export{Reader: r, Worker: flags.worker.Command()}, snapshot, part, folder)
	if err != nil {
		return err
	}
	card, err := cardOf(snapshot, data, part)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(folder, "README.md"), card, 0o644); err != nil {
		return exit.New(exit.CannotMake, "", "write the model card: %w", err)
	}
	message := flags.message
	if message == "" {
		message = fmt.Sprintf("%s of step %s of %s", part, output.Count(snapshot.GetStep()), snapshot.GetRunId())
	}
	env.Note("pushing %s of step %s (%s) to %s", part, output.Count(snapshot.GetStep()), output.Bytes(bytesOf(snapshot, part)), repository)
	done, err := upload(ctx, flags.worker.Command(), filepath.Join(scratch, "spec.json"), map[string]any{
		"folder": folder, "repository": repository, "revision": flags.revision, "private": !flags.public, "message": message,
	})
	if err != nil {
		return err
	}
	if env.JSON() {
		return output.Value(env.Stdout, map[string]any{
			"run_id": snapshot.GetRunId(), "snapshot_id": snapshot.GetSnapshotId(), "step": snapshot.GetStep(), "weights_digest": digest,
			"part": part, "repository": repository, "revision": flags.revision, "private": !flags.public, "commit": done.Commit, "url": done.URL,
		})
	}
	_, err = fmt.Fprintf(env.Stdout, "pushed %s\n", done.URL)
	return err
}

// upload runs the worker.
func upload(ctx context.Context, command []string, path string, spec map[string]any) (*pushed, error) {
	text, err := json.Marshal(spec)
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		return nil, exit.New(exit.CannotMake, "", "write the worker's spec: %w", err)
	}
	cmd := exec.CommandContext(ctx, command[0], append(command[1:], "push", "--spec", path)...)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	failed := cmd.Run()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var last pushed
	for lines := bufio.NewScanner(&out); lines.Scan(); {
		var one pushed
		if json.Unmarshal(lines.Bytes(), &one) == nil && one.Event != "" { // else output of a library
			last = one
		}
	}
	switch {
	case last.Event == "end" && failed == nil:
		return &last, nil
	case last.Event == "error":
		return nil, &exit.Error{Code: last.Code, Reason: last.Reason, Fix: last.Fix, Err: errors.New(last.Message)}
	}
	return nil, exit.New(exit.Software, "check the log above, or name another command with --worker", "the worker that pushes failed: %w\n%s", failed, tailOf(log.String()))
}
