package episodes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/exit"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// step is a turn of a replay. Turn 0 is what the policy read first.
type step struct {
	Turn           int      `json:"turn"`
	Said           string   `json:"said,omitempty"`
	Reward         float64  `json:"reward"`
	Text           string   `json:"text"`
	Same           bool     `json:"same"`
	Answered       *string  `json:"answered,omitempty"`
	AnsweredReward *float64 `json:"answered_reward,omitempty"`
}

// branch is one continuation of an episode.
type branch struct {
	Branch  int     `json:"branch"`
	Turns   []turn  `json:"turns"`
	Reward  float64 `json:"reward"`
	Outcome string  `json:"outcome"`
	Reason  string  `json:"reason,omitempty"`
}

type turn struct {
	Said   string  `json:"said"`
	Reward float64 `json:"reward"`
	Text   string  `json:"text,omitempty"`
}

// answer is what the worker prints.
type answer struct {
	Steps    []step   `json:"steps,omitempty"`
	Same     bool     `json:"same"`
	Problem  string   `json:"problem,omitempty"`
	Branches []branch `json:"branches,omitempty"`
	Error    *struct {
		Reason  string `json:"reason"`
		Message string `json:"message"`
		Fix     string `json:"fix"`
	} `json:"error,omitempty"`
}

func replayCommand(env *cli.Env) *cobra.Command {
	var worker cli.WorkerFlag
	cmd := &cobra.Command{
		Use:   "replay FROM EPISODE",
		Short: "Play the turns of an open episode again, step by step",
		Long: "Play the turns of an open episode again, step by step: the environment begins again and gets the recorded turns. Its answers and rewards\n" +
			"are compared with the recorded ones. Exits with code 65 if one differs. " + fromHelp + " " + nameHelp,
		Example: "  rollout episodes replay guess 0/18/2",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
				got, err := play(ctx, env, c, worker, args[0], args[1], map[string]any{"do": "replay"})
				if err != nil {
					return err
				}
				if env.JSON() {
					err = output.Value(env.Stdout, map[string]any{"steps": got.Steps, "same": got.Same, "problem": got.Problem})
				} else {
					_, err = fmt.Fprint(env.Stdout, replayText(env, got))
				}
				if err != nil || got.Same {
					return err
				}
				return exit.New(exit.Data, "make the environment depend on its row, its seed, and its turns only", "%s", got.Problem)
			})
		},
	}
	worker.AddTo(cmd)
	return cmd
}

func replayText(env *cli.Env, got *answer) string {
	s := env.Style()
	var out strings.Builder
	for _, step := range got.Steps {
		if step.Turn > 0 {
			fmt.Fprintf(&out, "%s  %q  %s\n", s.Cyan(fmt.Sprintf("policy, turn %d", step.Turn)), step.Said, s.Dim("reward "+output.Number(step.Reward)))
		}
		verdict := "same"
		if !step.Same {
			verdict = "differs"
			if step.Answered != nil {
				verdict = fmt.Sprintf("differs: %q", *step.Answered)
			}
		}
		fmt.Fprintf(&out, "%s  %q  %s\n", s.Dim("environment"), step.Text, verdict)
	}
	return out.String()
}

func branchCommand(env *cli.Env) *cobra.Command {
	var worker cli.WorkerFlag
	var count, at uint32
	cmd := &cobra.Command{
		Use:   "branch FROM EPISODE",
		Short: "Continue an open episode several times",
		Long: "Continue an open episode several times after its last completed turn, or after an earlier one, and show how each branch ends. Branch 0 has\n" +
			"the episode's own seed. The weights are those of the snapshot, of a run those of its newest one. The run is not changed.\n" +
			fromHelp + " " + nameHelp,
		Example: "  rollout episodes branch guess 0/18/2 --branches 8\n  rollout episodes branch snap-01kapq5q5m 0/18/2 --at 1 --format json",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if count == 0 {
				return cli.Usage("--branches 0: write a positive number")
			}
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
				got, err := play(ctx, env, c, worker, args[0], args[1], map[string]any{"do": "branch", "branches": count, "at": at})
				if err != nil {
					return err
				}
				if env.JSON() {
					return output.Value(env.Stdout, map[string]any{"branches": got.Branches})
				}
				_, err = fmt.Fprint(env.Stdout, branchText(env, got))
				return err
			})
		},
	}
	cmd.Flags().Uint32VarP(&count, "branches", "n", 4, "`number` of branches")
	cmd.Flags().Uint32Var(&at, "at", 0, "completed `turn` after which to branch, from 1 (default: the last one)")
	worker.AddTo(cmd)
	return cmd
}

func branchText(env *cli.Env, got *answer) string {
	s := env.Style()
	var out strings.Builder
	for _, b := range got.Branches {
		fmt.Fprintln(&out, strings.TrimSpace(fmt.Sprintf("%s  reward %s, %s %s", s.Bold(fmt.Sprintf("branch %d", b.Branch)), output.Number(b.Reward),
			strings.ToUpper(b.Outcome), b.Reason)))
		for _, t := range b.Turns {
			fmt.Fprintf(&out, "  %s  %q  %s\n", s.Cyan("policy"), t.Said, s.Dim("reward "+output.Number(t.Reward)))
			if t.Text != "" {
				fmt.Fprintf(&out, "  %s  %q\n", s.Dim("environment"), t.Text)
			}
		}
	}
	return out.String()
}

// play runs `rollout-worker episodes` with an episode, its plan, and the weights of a snapshot.
func play(ctx context.Context, env *cli.Env, c *client.Client, worker cli.WorkerFlag, from, name string, request map[string]any) (*answer, error) {
	episode, snapshot, err := find(ctx, c, from, name)
	if err != nil {
		return nil, err
	}
	if snapshot == nil {
		listed, err := c.Snapshot.ListSnapshots(ctx, &snapshotv1.ListSnapshotsRequest{
			RunId: episode.GetKey().GetRunId(), Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, PageSize: 1,
		})
		if err != nil {
			return nil, err
		}
		if len(listed.GetSnapshots()) > 0 {
			snapshot = listed.GetSnapshots()[0]
		}
	}
	plan, base := snapshot.GetOrigin().GetPlan(), snapshot.GetOrigin().GetBaseDir()
	if plan == nil {
		got, err := c.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: episode.GetKey().GetRunId()})
		if err != nil {
			return nil, err
		}
		plan, base = got.GetStatus().GetRun().GetPlan(), got.GetStatus().GetRun().GetBaseDir()
	}
	scratch, err := os.MkdirTemp("", "rollout-episodes-")
	if err != nil {
		return nil, exit.New(exit.CannotMake, "set TMPDIR to a folder with space", "make a temporary folder: %w", err)
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	if snapshot != nil && request["do"] == "branch" {
		export := record.Export{Reader: record.Services{Client: c}, Worker: worker.Command()}
		weights, err := export.Keep(ctx, snapshot, scratch)
		if err != nil {
			return nil, err
		}
		request["weights"], request["version"] = weights, snapshot.GetStep()
	}
	written := protojson.MarshalOptions{UseProtoNames: true}
	planText, err := written.Marshal(plan)
	if err != nil {
		return nil, err
	}
	episodeText, err := written.Marshal(episode)
	if err != nil {
		return nil, err
	}
	request["plan"], request["episode"], request["base_dir"], request["folder"] = json.RawMessage(planText), json.RawMessage(episodeText), base, scratch
	return ask(ctx, env, worker.Command(), scratch, request)
}

func ask(ctx context.Context, env *cli.Env, command []string, scratch string, request map[string]any) (*answer, error) {
	text, err := json.Marshal(request)
	spec := filepath.Join(scratch, "request.json")
	if err == nil {
		err = os.WriteFile(spec, text, 0o600)
	}
	if err != nil {
		return nil, exit.New(exit.CannotMake, "", "write the worker's request: %w", err)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, command[0], append(command[1:], "episodes", "--spec", spec)...)
	cmd.Stdout, cmd.Stderr = &out, env.Stderr
	failed := cmd.Run()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var got answer
	switch err := json.Unmarshal(out.Bytes(), &got); {
	case err == nil && got.Error != nil:
		return nil, &exit.Error{Code: exit.Data, Reason: got.Error.Reason, Fix: got.Error.Fix, Err: errors.New(got.Error.Message)}
	case failed != nil:
		return nil, exit.New(exit.Unavailable, "see the lines above, or name another command with --worker", "%s: %w", strings.Join(command, " "), failed)
	case err != nil:
		return nil, exit.New(exit.Software, "name another command with --worker", "%s printed no answer: %w", strings.Join(command, " "), err)
	}
	return &got, nil
}
