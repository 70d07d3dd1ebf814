package run

import (
	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/exit"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// TrainCommand returns `rollout train`.
func TrainCommand(env *cli.Env) *cobra.Command {
	flags := runFlags{dataOnly: true}
	cmd := &cobra.Command{
		Use:   "train (--config FILE | --plan FILE | --resume RUN)",
		Short: "Train on data, without sampling: SFT, reward model, DPO, IPO, KTO",
		Long: `Train on the rows of a dataset as they are: supervised fine-tuning, reward models, DPO, IPO, KTO. It is rollout run for an algorithm
that needs no sampling, with the same plan, snapshots, logs and live view, and refuses another.

What a row of data.train (JSON Lines) holds beside "prompt", each field named by a key of [data]:

  [algorithm.sft]                          "answer"
  [algorithm.dpo], ipo, reward_model       "chosen" and "rejected"; for a reward model data.margin_field may name a number
  [algorithm.kto]                          "completion" and "label", true or false`,
		Example: `  rollout train --config dpo.toml
  rollout train --config reward_model.toml --set train.steps=100`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return execute(env, cmd, &flags) },
	}
	flags.addRunFlags(cmd)
	return cmd
}

// fits refuses a plan that the command is not for.
func (flags *runFlags) fits(plan *planv1.Plan) error {
	if !flags.dataOnly || plan == nil || algorithm.FromData(plan.GetConfig()) {
		return nil
	}
	return exit.New(exit.Usage, "use `rollout run`", "%s samples from the policy; rollout train is for data", algorithm.Title(plan.GetConfig()))
}
