// Package completions has the command `rollout completions`.
package completions

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/completion"
	"github.com/rollout-rl/rollout/libs/exit"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Command returns `rollout completions`.
func Command(env *cli.Env) *cobra.Command {
	var step uint64
	var all bool
	cmd := &cobra.Command{
		Use:   "completions RUN",
		Short: "Show sampled completions with rewards and advantages",
		Long: `Show completions that the run was trained on, with rewards and advantages: those of the newest step, of one step, or of all steps.
[completions] in the configuration sets how many are stored.

` + cli.FolderHelp + " " + cli.RunHelp,
		Example: `  rollout completions addition-grpo
  rollout completions addition-grpo --step 40
  rollout completions addition-grpo --all --format json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.Records(cmd, func(ctx context.Context, r record.Reader) error {
				status, err := r.Run(ctx, args[0])
				if err != nil {
					return err
				}
				run := status.GetRun()
				if step == 0 && !all {
					newest, err := record.NewestCompletions(ctx, r, run.GetRunId())
					if err != nil {
						return err
					}
					return show(env, run, newest)
				}
				found := false
				if err := record.Completions(ctx, r, run.GetRunId(), func(k record.Kept) error {
					if !all && k.Step != step {
						return nil
					}
					found = true
					return show(env, run, k)
				}); err != nil || found {
					return err
				}
				return show(env, run, record.Kept{Step: step})
			})
		},
	}
	cmd.Flags().Uint64Var(&step, "step", 0, "`step` whose completions are shown (default: the newest with completions)")
	cmd.Flags().BoolVar(&all, "all", false, "show the completions of every step")
	cmd.MarkFlagsMutuallyExclusive("step", "all")
	return cmd
}

// show prints the completions of a step.
func show(env *cli.Env, run *runv1.Run, k record.Kept) error {
	if len(k.Completions) == 0 {
		return noCompletions(run, k.Step)
	}
	if env.JSON() {
		for _, c := range k.Completions {
			if err := output.ValueLine(env.Stdout, struct {
				Step uint64 `json:"step"`
				completion.Completion
			}{k.Step, c}); err != nil {
				return err
			}
		}
		return nil
	}
	_, err := fmt.Fprint(env.Stdout, keptText(env, k))
	return err
}

// noCompletions returns an error that says why a step, or with step 0 the run, has no completions.
func noCompletions(run *runv1.Run, step uint64) error {
	id, config := run.GetRunId(), run.GetPlan().GetConfig()
	what := "no completions"
	if step > 0 {
		what = fmt.Sprintf("no completions of step %d", step)
	}
	switch {
	case algorithm.FromData(config):
		fix := "see the held-out answers with `rollout report " + id + "`, if [eval] is configured"
		if config.GetReward() == nil {
			fix = "sample answers with `rollout infer batch --run " + id + " --output answers.jsonl`"
		}
		return exit.New(exit.NoInput, fix,
			"run %s has %s: %s trains on data and does not sample", id, what, algorithm.Title(config))
	case run.GetStep() < max(step, 1):
		last := "it has not made a step yet"
		if run.GetStep() > 0 {
			last = "its last step is " + output.Count(run.GetStep())
		}
		fix := "wait for the step; see the progress with `rollout runs show " + id + "`"
		if run.GetState() == runv1.RunState_RUN_STATE_SUCCEEDED {
			fix = "choose one of its steps"
		} else if live.Over(run) {
			fix = "resume it with `rollout run --resume " + id + "`"
		}
		return exit.New(exit.NoInput, fix, "run %s has %s: %s", id, what, last)
	}
	return exit.New(exit.NoInput, "see `per_step` and `every_steps` of [completions] in its configuration", "run %s has stored %s", id, what)
}

func keptText(env *cli.Env, k record.Kept) string {
	s := env.Style()
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", s.Bold(fmt.Sprintf("step %d", k.Step)))
	var table output.Table
	for i, c := range k.Completions {
		if i == 0 || c.Index != k.Completions[i-1].Index || c.Epoch != k.Completions[i-1].Epoch {
			b.WriteString(table.String())
			table = output.Table{}
			fmt.Fprintf(&b, "epoch %d, row %d  %s\n", c.Epoch, c.Index, s.Cyan(strings.Join(shown(turns(c.Prompt)), "  ")))
		}
		advantage := "-"
		if c.Advantage != nil {
			advantage = fmt.Sprintf("%+.3f", *c.Advantage)
		}
		lines := shown(turns(c.Completion))
		if c.Truncated {
			lines[len(lines)-1] += s.Dim(" (cut off)")
		}
		table.Row(fmt.Sprintf("  %d", c.Sample), "reward "+output.Number(c.Reward), "advantage "+advantage, fmt.Sprintf("%d tokens", c.Tokens), lines[0])
		for _, line := range lines[1:] {
			table.Row("", "", "", "", line)
		}
	}
	b.WriteString(table.String())
	return b.String()
}

// turn is a message of a conversation.
type turn struct {
	role string // empty: the policy, or a prompt without roles
	text string
}

// marker begins each message in the text of a conversation, which the gateway writes.
var marker = regexp.MustCompile(`(?m)^\[(system|developer|user|assistant|tool)\] `)

// turns splits the text of a conversation; a text without markers is one turn.
func turns(text string) []turn {
	found := marker.FindAllStringSubmatchIndex(text, -1)
	if len(found) == 0 {
		return []turn{{text: text}}
	}
	var out []turn
	if first := strings.TrimSuffix(text[:found[0][0]], "\n"); first != "" {
		out = append(out, turn{text: first})
	}
	for i, at := range found {
		t := turn{role: text[at[2]:at[3]]}
		if i+1 < len(found) {
			t.text = strings.TrimSuffix(text[at[1]:found[i+1][0]], "\n")
		} else {
			t.text = text[at[1]:]
		}
		if t.role == "assistant" {
			t.role = ""
		} else {
			t.text = strings.TrimRight(t.text, "\n")
		}
		out = append(out, t)
	}
	return out
}

// shown is a line for each turn. Those that the policy did not sample have their role.
func shown(turns []turn) []string {
	lines := make([]string, len(turns))
	for i, t := range turns {
		if lines[i] = strconv.Quote(t.text); t.role != "" {
			lines[i] = t.role + " " + lines[i]
		}
	}
	return lines
}
