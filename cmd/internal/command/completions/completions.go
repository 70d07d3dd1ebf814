// Package completions has the command `rollout completions`.
package completions

import (
	"context"
	"fmt"
	"regexp"
	"slices"
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
	var only selection
	cmd := &cobra.Command{
		Use:   "completions RUN",
		Short: "Show sampled completions with rewards and advantages",
		Long: `Show completions that the run was trained on, with rewards and advantages: those of the newest step, of one step, or of all steps.
[completions] in the configuration sets how many are stored.

An episode with several turns is shown turn by turn: what the policy read, what it said, its tool calls with their arguments, and for each
turn the reward, the weights that sampled it, and how long it took. Text that is not trained on is dim. With --tokens each token has its
id and logprob; brackets mark tokens that are not trained on. docs/metrics.md describes the JSON.

` + cli.FolderHelp + " " + cli.RunHelp,
		Example: `  rollout completions addition-grpo
  rollout completions addition-grpo --step 40
  rollout completions guess --group 7 --sample 2 --tokens
  rollout completions addition-grpo --all --format json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			only.all = all
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
					return show(env, run, newest, only)
				}
				found := false
				if err := record.Completions(ctx, r, run.GetRunId(), func(k record.Kept) error {
					if !all && k.Step != step {
						return nil
					}
					found = true
					return show(env, run, k, only)
				}); err != nil || found {
					return err
				}
				return show(env, run, record.Kept{Step: step}, only)
			})
		},
	}
	cmd.Flags().Uint64Var(&step, "step", 0, "`step` whose completions are shown (default: the newest with completions)")
	cmd.Flags().BoolVar(&all, "all", false, "show the completions of every step")
	cmd.Flags().Int64Var(&only.group, "group", -1, "show the `row` of the epoch's order only, as printed")
	cmd.Flags().Int64Var(&only.sample, "sample", -1, "show the sample with this `number` in its group only")
	cmd.Flags().BoolVar(&only.tokens, "tokens", false, "show the tokens of episodes with several turns: ids, logprobs, and which are trained on")
	cmd.MarkFlagsMutuallyExclusive("step", "all")
	return cmd
}

// selection is what is shown of a step. A negative group or sample selects all.
type selection struct {
	group, sample int64
	tokens, all   bool
}

func (s selection) drops(c completion.Completion) bool {
	return s.group >= 0 && c.Index != uint64(s.group) || s.sample >= 0 && int64(c.Sample) != s.sample
}

// show prints the completions of a step.
func show(env *cli.Env, run *runv1.Run, k record.Kept, only selection) error {
	if len(k.Completions) == 0 {
		return noCompletions(run, k.Step)
	}
	if k.Completions = slices.DeleteFunc(k.Completions, only.drops); len(k.Completions) == 0 && !only.all {
		return exit.New(exit.NoInput, fmt.Sprintf("list those of the step with `rollout completions %s --step %d`", run.GetRunId(), k.Step),
			"run %s has stored no such completion of step %d", run.GetRunId(), k.Step)
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
	_, err := fmt.Fprint(env.Stdout, keptText(env, k, only.tokens))
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

func keptText(env *cli.Env, k record.Kept, tokens bool) string {
	s := env.Style()
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", s.Bold(fmt.Sprintf("step %d", k.Step)))
	var table output.Table
	for i, c := range k.Completions {
		if i == 0 || c.Index != k.Completions[i-1].Index || c.Epoch != k.Completions[i-1].Epoch {
			b.WriteString(table.String())
			table = output.Table{}
			title := fmt.Sprintf("epoch %d, row %d", c.Epoch, c.Index)
			if len(c.Turns) == 0 {
				title += "  " + s.Cyan(strings.Join(shown(turns(c.Prompt)), "  "))
			}
			b.WriteString(title + "\n")
		}
		if len(c.Turns) > 0 {
			e := episode{of: c, style: s, tokens: tokens}
			b.WriteString(e.text())
			continue
		}
		lines := shown(turns(c.Completion))
		if c.Truncated {
			lines[len(lines)-1] += s.Dim(" (cut off)")
		}
		table.Row(fmt.Sprintf("  %d", c.Sample), "reward "+output.Number(c.Reward), "advantage "+signed(c.Advantage), fmt.Sprintf("%d tokens", c.Tokens), lines[0])
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
