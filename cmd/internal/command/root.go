// Package command builds the command line of rollout: a package for each group of commands.
package command

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/command/audit"
	"github.com/rollout-rl/rollout/cmd/internal/command/certs"
	"github.com/rollout-rl/rollout/cmd/internal/command/chat"
	"github.com/rollout-rl/rollout/cmd/internal/command/compare"
	"github.com/rollout-rl/rollout/cmd/internal/command/completions"
	"github.com/rollout-rl/rollout/cmd/internal/command/daemon"
	"github.com/rollout-rl/rollout/cmd/internal/command/docs"
	"github.com/rollout-rl/rollout/cmd/internal/command/doctor"
	"github.com/rollout-rl/rollout/cmd/internal/command/episodes"
	"github.com/rollout-rl/rollout/cmd/internal/command/eval"
	"github.com/rollout-rl/rollout/cmd/internal/command/explain"
	"github.com/rollout-rl/rollout/cmd/internal/command/export"
	"github.com/rollout-rl/rollout/cmd/internal/command/infer"
	"github.com/rollout-rl/rollout/cmd/internal/command/keys"
	"github.com/rollout-rl/rollout/cmd/internal/command/logs"
	"github.com/rollout-rl/rollout/cmd/internal/command/plan"
	"github.com/rollout-rl/rollout/cmd/internal/command/plugin"
	"github.com/rollout-rl/rollout/cmd/internal/command/process"
	"github.com/rollout-rl/rollout/cmd/internal/command/recipe"
	"github.com/rollout-rl/rollout/cmd/internal/command/replay"
	"github.com/rollout-rl/rollout/cmd/internal/command/report"
	"github.com/rollout-rl/rollout/cmd/internal/command/run"
	"github.com/rollout-rl/rollout/cmd/internal/command/runs"
	"github.com/rollout-rl/rollout/cmd/internal/command/serve"
	"github.com/rollout-rl/rollout/cmd/internal/command/snapshot"
	"github.com/rollout-rl/rollout/cmd/internal/command/status"
	"github.com/rollout-rl/rollout/cmd/internal/command/version"
)

const rootLong = `rollout trains language models with reinforcement learning, from a laptop to a cluster.

Write a configuration (TOML), by hand or from a recipe, pin it in a plan, and run the plan:

  rollout init --recipe grpo-math --model models/Qwen3-0.6B
  rollout plan --config run.toml
  rollout run --plan plan.lock

Commands call a control plane. Without --server they use a local daemon (rolloutd), and start it if needed. Commands that only read
start no daemon: they read the state folder of the last one, and exit with code 69 if it does not exist.

Exit codes:

  0    success
  64   the command line is wrong
  65   a configuration, dataset, reward, model or plan is invalid
  66   a file, run or snapshot does not exist
  69   the server cannot be reached
  70   the run failed
  73   a file cannot be written
  130  interrupted`

// Execute runs one command line and returns its exit code.
func Execute(ctx context.Context, env *cli.Env, args []string) int {
	root := Root(env)
	root.SetArgs(args)
	command, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	e := cli.Explain(command, err)
	if e.Err != nil {
		env.Error(e, err)
	}
	return e.Code
}

// Root returns the tree of commands.
func Root(env *cli.Env) *cobra.Command {
	root := &cobra.Command{
		Use:                        "rollout",
		Short:                      "Train language models with reinforcement learning",
		Long:                       rootLong,
		SilenceUsage:               true,
		SilenceErrors:              true,
		SuggestionsMinimumDistance: 2,
		Args:                       cobra.ArbitraryArgs,
		RunE:                       cli.ShowHelp,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if format := env.Format; format != cli.FormatText && format != cli.FormatJSON {
				env.Format = cli.FormatText
				return cli.Usage("invalid argument %q for --format: must be text or json", format)
			}
			return nil
		},
	}
	root.SetIn(env.Stdin)
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	root.SetFlagErrorFunc(cli.FlagError)
	root.Version = env.Version
	root.SetVersionTemplate(version.Text(env))
	root.Flags().Bool("version", false, "print the version and exit")
	root.PersistentFlags().StringVar(&env.Format, "format", cli.FormatText, "output format: `text` or json (one document; one line per record where output is streamed)")
	_ = root.RegisterFlagCompletionFunc("format", cobra.FixedCompletions([]string{cli.FormatText, cli.FormatJSON}, cobra.ShellCompDirectiveNoFileComp))
	env.Plane.AddFlags(root)

	addGroup(root, "train", "Train:",
		recipe.Command(env), plan.ValidateCommand(env), plan.Command(env), run.Command(env), run.TrainCommand(env))
	addGroup(root, "watch", "Watch and use:",
		runs.Command(env), explain.Command(env), logs.Command(env), status.Command(env), serve.Command(env), chat.Command(env), completions.Command(env), episodes.Command(env), report.Command(env), compare.Command(env),
		export.Command(env), infer.Command(env), eval.Command(env), audit.Command(env), replay.Command(env))
	addGroup(root, "manage", "Manage:",
		snapshot.Command(env), daemon.Command(env), doctor.Command(env), process.Command(env), plugin.Command(env), certs.Command(env), keys.Command(env), version.Command(env))
	root.SetHelpCommandGroupID("manage")
	root.SetCompletionCommandGroupID("manage")
	root.AddCommand(docs.Command(env))
	return root
}

func addGroup(root *cobra.Command, id, title string, commands ...*cobra.Command) {
	root.AddGroup(&cobra.Group{ID: id, Title: title})
	for _, command := range commands {
		command.GroupID = id
		root.AddCommand(command)
	}
}
