package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/exit"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/problem"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/atomicfile"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// configFlags are those of commands that read a configuration.
type configFlags struct {
	file string
	set  []string
}

func (f *configFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.file, "config", "c", "", "configuration `file` (TOML)")
	cmd.Flags().StringArrayVar(&f.set, "set", nil, "override a field, `table.key=value`; may be given several times")
	_ = cmd.MarkFlagFilename("config", "toml")
}

// source reads the file.
func (f *configFlags) source() (*planv1.ConfigSource, error) {
	text, err := readFile(f.file, "configuration")
	if err != nil {
		return nil, err
	}
	folder, err := filepath.Abs(filepath.Dir(f.file))
	if err != nil {
		return nil, err
	}
	return &planv1.ConfigSource{Toml: text, File: f.file, BaseDir: folder, Set: f.set}, nil
}

func readFile(name, what string) ([]byte, error) {
	data, err := os.ReadFile(name)
	if err == nil {
		return data, nil
	}
	var path *os.PathError
	if errors.As(err, &path) {
		err = path.Err
	}
	return nil, exit.New(exit.NoInput, "correct the path", "can't read the %s %s: %w", what, name, err)
}

func (a *app) validateCommand() *cobra.Command {
	var flags configFlags
	cmd := &cobra.Command{
		Use:   "validate --config FILE",
		Short: "Check a configuration's syntax, keys, types and rules",
		Long: `Check a configuration's syntax, keys, types and rules. All problems are shown at once, each with its place and how to fix it.
No dataset is read and no plugin is loaded: rollout plan does that.`,
		Example: `  rollout validate --config grpo.toml
  rollout validate --config grpo.toml --set train.steps=100 --set mode=async
  rollout validate --config grpo.toml --format json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			source, err := flags.source()
			if err != nil {
				return err
			}
			return a.with(cmd, func(ctx context.Context, c *client.Client) error {
				response, err := c.Planner.ValidateConfig(ctx, &planv1.ValidateConfigRequest{Source: source})
				if err != nil {
					return err
				}
				err = a.message(response, func() string {
					return problem.Render(response.GetProblems(), a.style()) + validText(flags.file, response.GetConfig())
				})
				return errors.Join(err, problemExit(response.GetProblems()))
			})
		},
	}
	flags.add(cmd)
	_ = cmd.MarkFlagRequired("config")
	return cmd
}

func validText(file string, config *configv1.RunConfig) string {
	if config == nil {
		return ""
	}
	return fmt.Sprintf("%s is valid: %s\n", file, gist(config))
}

// gist is a configuration in one line.
func gist(config *configv1.RunConfig) string {
	work := algorithm.Title(config)
	if config.GetAlgorithm().GetSft() != nil {
		work += " on reference answers"
	}
	if !algorithm.FromData(config) {
		work += " with " + output.Plural(config.GetSampling().GetGroupSize(), "sample") + " a prompt"
	}
	unit := " prompts"
	if algorithm.Pairs(config) {
		unit = " pairs"
	} else if algorithm.FromData(config) {
		unit = " rows"
	}
	prompts := output.Count(config.GetTrain().GetGroupsPerStep()) + unit
	if draws := algorithm.DrawBatches(config); draws > 1 {
		prompts += fmt.Sprintf(" whose rewards differ (of at most %s drawn)", output.Count(config.GetTrain().GetGroupsPerStep()*draws))
	}
	return fmt.Sprintf("%s, %s steps of %s, %s", work, output.Count(config.GetTrain().GetSteps()), prompts, config.GetMode())
}

// problemExit is nil where there are none; 66 where all that is wrong is that files are not there.
func problemExit(problems []*planv1.Problem) error {
	if len(problems) == 0 {
		return nil
	}
	for _, p := range problems {
		if p.GetReason() != "MISSING_FILE" {
			return exit.Silent(exit.Data)
		}
	}
	return exit.Silent(exit.NoInput)
}

func (a *app) planCommand() *cobra.Command {
	var flags configFlags
	var out string
	cmd := &cobra.Command{
		Use:   "plan --config FILE",
		Short: "Check everything that a run needs and pin it in plan.lock",
		Long: `Check everything that can be known before a run, and pin it: the configuration with every default, the digest of each dataset,
model file and source of the reward, the versions of the packages. Every row is parsed and measured with the tokenizer, and the
reward is called once. The same inputs give the same bytes.`,
		Example: `  rollout plan --config grpo.toml
  rollout plan --config grpo.toml -o plans/first.lock
  rollout run --plan plan.lock`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			source, err := flags.source()
			if err != nil {
				return err
			}
			return a.with(cmd, func(ctx context.Context, c *client.Client) error {
				response, err := a.createPlan(ctx, c, source)
				if err != nil {
					return err
				}
				path := out
				if path == "" {
					path = filepath.Join(filepath.Dir(flags.file), "plan.lock")
				}
				if err := writeFile(path, response.GetLock()); err != nil {
					return err
				}
				return a.message(response.GetPlan(), func() string { return a.planText(path, source, response.GetPlan()) })
			})
		},
	}
	flags.add(cmd)
	cmd.Flags().StringVarP(&out, "output", "o", "", "`file` to write (default: plan.lock beside the configuration)")
	_ = cmd.MarkFlagRequired("config")
	return cmd
}

// createPlan plans, and shows what stands against it.
func (a *app) createPlan(ctx context.Context, c *client.Client, source *planv1.ConfigSource) (*planv1.CreatePlanResponse, error) {
	response, err := c.Planner.CreatePlan(ctx, &planv1.CreatePlanRequest{Source: source})
	if err != nil {
		return nil, err
	}
	for _, w := range response.GetWarnings() {
		a.note("%s %s:%d: %s\n   fix: %s", a.errStyle().Yellow("warning:"), w.GetFile(), w.GetLine(), w.GetMessage(), w.GetFix())
	}
	if len(response.GetProblems()) == 0 {
		return response, nil
	}
	err = a.message(response, func() string { return problem.Render(response.GetProblems(), a.style()) })
	return nil, errors.Join(err, problemExit(response.GetProblems()))
}

func (a *app) planText(path string, source *planv1.ConfigSource, plan *planv1.Plan) string {
	s := a.style()
	var table output.Table
	total := uint64(0)
	for _, in := range plan.GetInputs() {
		rows := ""
		if in.GetRows() > 0 {
			rows = output.Plural(in.GetRows(), "row")
		}
		table.Row("  "+roleName(in.GetRole()), in.GetPath(), output.Bytes(in.GetBytes()), s.Dim(output.Short(in.GetDigest())), rows)
		total += in.GetBytes()
	}
	text := fmt.Sprintf("%s %s\n%s\n%s", s.Bold(path), s.Dim(plan.GetPlanId()), gist(plan.GetConfig()), table.String())
	checked := "every row and the model's folder were checked"
	if plan.GetConfig().GetReward() != nil {
		checked = "every row, the model's folder and the reward were checked"
	}
	text += fmt.Sprintf("%d files, %s; %s\n", len(plan.GetInputs()), output.Bytes(total), checked)
	run := "rollout run --plan " + path
	if folder, err := filepath.Abs(filepath.Dir(path)); err == nil && folder != source.GetBaseDir() {
		run += " --base-dir " + source.GetBaseDir()
	}
	return text + "next: " + s.Cyan(run) + "\n"
}

func roleName(role planv1.InputRole) string {
	switch role {
	case planv1.InputRole_INPUT_ROLE_TRAIN_DATA:
		return "train"
	case planv1.InputRole_INPUT_ROLE_EVAL_DATA:
		return "eval"
	case planv1.InputRole_INPUT_ROLE_MODEL:
		return "model"
	case planv1.InputRole_INPUT_ROLE_REWARD:
		return "reward"
	}
	return "?"
}

// writeFile replaces a file whole or not at all.
func writeFile(path string, data []byte) error {
	err := atomicfile.Write(path, data, 0o644)
	var place *os.PathError
	if errors.As(err, &place) {
		err = place.Err
	}
	if err != nil {
		return exit.New(exit.CannotMake, "name another file with -o", "can't write %s: %w", path, err)
	}
	return nil
}
