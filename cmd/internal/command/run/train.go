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
		Short: "Train on a dataset without sampling: SFT, reward model, DPO, IPO, KTO",
		Long: `Train on the rows of a dataset: supervised fine-tuning, reward models, DPO, IPO, KTO. This is rollout run, restricted to algorithms
that do not sample from the policy.

A row of data.train has a "prompt" and these fields, whose names are set in [data]:

  [algorithm.sft]                          "answer"
  [algorithm.dpo], ipo, reward_model       "chosen" and "rejected"; for a reward model, data.margin_field can name a number
  [algorithm.kto]                          "completion" and "label", true or false`,
		Example: `  rollout train --config dpo.toml
  rollout train --config reward_model.toml --set train.steps=100`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return execute(env, cmd, &flags) },
	}
	flags.addRunFlags(cmd)
	return cmd
}

// fits returns an error if the plan's algorithm samples and the command is `rollout train`.
func (flags *runFlags) fits(plan *planv1.Plan) error {
	if !flags.dataOnly || plan == nil || algorithm.FromData(plan.GetConfig()) {
		return nil
	}
	return exit.New(exit.Usage, "use `rollout run`", "%s samples from the policy; rollout train only trains on data", algorithm.Title(plan.GetConfig()))
}
