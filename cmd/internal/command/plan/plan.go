// Package plan has the commands `rollout validate` and `rollout plan`.
package plan

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/daemon"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/problem"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/atomicfile"
	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// ValidateCommand returns `rollout validate`.
func ValidateCommand(env *cli.Env) *cobra.Command {
	var flags cli.ConfigFlags
	cmd := &cobra.Command{
		Use:   "validate --config FILE",
		Short: "Validate a run configuration",
		Long: `Validate the syntax, keys, types and rules of a run configuration. All problems are listed, each with its line and a fix.
Datasets and plugins are not loaded; use rollout plan for that.`,
		Example: `  rollout validate --config grpo.toml
  rollout validate --config grpo.toml --set train.steps=100 --set mode=async
  rollout validate --config grpo.toml --format json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			source, err := flags.Source()
			if err != nil {
				return err
			}
			request := &planv1.ValidateConfigRequest{Source: source}
			var response *planv1.ValidateConfigResponse
			if env.Plane.Local() {
				response, err = daemon.Validate(cmd.Context(), request)
			} else {
				err = env.Plane.Look(cmd, func(ctx context.Context, c *client.Client) error {
					response, err = c.Planner.ValidateConfig(ctx, request)
					return err
				})
			}
			if err != nil {
				return err
			}
			err = env.Message(response, func() string {
				return problem.Render(response.GetProblems(), env.Style()) + validText(flags.File, response.GetConfig())
			})
			return errors.Join(err, problem.Exit(response.GetProblems()))
		},
	}
	flags.AddTo(cmd)
	_ = cmd.MarkFlagRequired("config")
	return cmd
}

func validText(file string, config *configv1.RunConfig) string {
	if config == nil {
		return ""
	}
	return fmt.Sprintf("%s is valid: %s\n", file, gist(config))
}

// gist describes a configuration in one line.
func gist(config *configv1.RunConfig) string {
	work := algorithm.Title(config)
	if config.GetAlgorithm().GetSft() != nil {
		work += " on reference answers"
	}
	if !algorithm.FromData(config) {
		work += " with " + output.Plural(config.GetSampling().GetGroupSize(), "sample") + " per prompt"
	}
	unit := " prompts"
	if algorithm.Pairs(config) {
		unit = " pairs"
	} else if algorithm.FromData(config) {
		unit = " rows"
	}
	prompts := output.Count(config.GetTrain().GetGroupsPerStep()) + unit
	if draws := algorithm.DrawBatches(config); draws > 1 {
		prompts += fmt.Sprintf(" with differing rewards (at most %s sampled)", output.Count(config.GetTrain().GetGroupsPerStep()*draws))
	}
	length := output.Count(config.GetTrain().GetSteps()) + " steps"
	if config.GetTrain().Steps == nil { // the plan computes them
		length = fmt.Sprintf("%g epochs in steps", config.GetTrain().GetEpochs())
	}
	return fmt.Sprintf("%s, %s of %s, %s", work, length, prompts, config.GetMode())
}

// Command returns `rollout plan`.
func Command(env *cli.Env) *cobra.Command {
	var flags cli.ConfigFlags
	var out string
	var explain memoryFlags
	cmd := &cobra.Command{
		Use:   "plan --config FILE",
		Short: "Check the inputs of a run and pin them in plan.lock",
		Long: `Check the inputs of a run, and write a plan that pins them: the configuration with all defaults, the digests of datasets, model
files and reward code, and package versions. Every row is parsed and tokenized, and the reward is called once. The same inputs
give the same plan, byte for byte. Rows that are not in one JSON Lines file, and models of the hub, are made or downloaded once;
see docs/data.md.`,
		Example: `  rollout plan --config grpo.toml
  rollout plan --config grpo.toml -o plans/first.lock
  rollout plan --config grpo.toml --explain-memory
  rollout plan --config grpo.toml --gpus 8x80GB --set train.ranks=8
  rollout run --plan plan.lock`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			source, err := flags.Source()
			if err != nil {
				return err
			}
			host, err := explain.host()
			if err != nil {
				return err
			}
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
				if host != nil || explain.explain {
					return explainMemory(ctx, env, c, source, host)
				}
				response, err := Create(ctx, env, c, source)
				if err != nil {
					return err
				}
				path := out
				if path == "" {
					path = filepath.Join(filepath.Dir(flags.File), "plan.lock")
				}
				if err := writeFile(path, response.GetLock()); err != nil {
					return err
				}
				return env.Message(response.GetPlan(), func() string { return planText(env, path, source, response) })
			})
		},
	}
	flags.AddTo(cmd)
	explain.addTo(cmd)
	cmd.Flags().StringVarP(&out, "output", "o", "", "`file` to write (default: plan.lock in the folder of the configuration)")
	_ = cmd.MarkFlagRequired("config")
	return cmd
}

// Create makes a plan. It prints warnings as notes, and problems as the answer of the command.
func Create(ctx context.Context, env *cli.Env, c *client.Client, source *planv1.ConfigSource) (*planv1.CreatePlanResponse, error) {
	response, err := c.Planner.CreatePlan(ctx, &planv1.CreatePlanRequest{Source: source})
	if err != nil {
		return nil, err
	}
	for _, w := range response.GetWarnings() {
		env.Note("%s %s:%d: %s\n   fix: %s", env.ErrStyle().Yellow("warning:"), w.GetFile(), w.GetLine(), w.GetMessage(), w.GetFix())
	}
	if len(response.GetProblems()) == 0 {
		return response, nil
	}
	err = env.Message(response, func() string { return problem.Render(response.GetProblems(), env.Style()) })
	return nil, errors.Join(err, problem.Exit(response.GetProblems()))
}

func planText(env *cli.Env, path string, source *planv1.ConfigSource, response *planv1.CreatePlanResponse) string {
	s, plan := env.Style(), response.GetPlan()
	var table output.Table
	total := uint64(0)
	for _, in := range plan.GetInputs() {
		table.Row("  "+roleName(in.GetRole()), in.GetPath(), output.Bytes(in.GetBytes()), s.Dim(output.Short(in.GetDigest())), rowsText(in))
		for _, source := range in.GetSources() {
			table.Row("", "  "+sourceText(source), "", "", takenText(source))
		}
		total += in.GetBytes()
	}
	text := fmt.Sprintf("%s %s\n%s\n%s\n%s", s.Bold(path), s.Dim(plan.GetPlanId()), gist(plan.GetConfig()), settingsText(s, response.GetSettings()), table.String())
	text += toolsText(s, plan.GetTools())
	checked := "every row and the model folder were checked"
	if plan.GetConfig().GetReward() != nil {
		checked = "every row, the model folder and the reward were checked"
	} else if plan.GetConfig().GetEnvironment().GetPath() != "" {
		checked = "every row, the model folder and the environment were checked"
	}
	text += fmt.Sprintf("%d files, %s; %s\n", len(plan.GetInputs()), output.Bytes(total), checked)
	run := "rollout run --plan " + path
	if folder, err := filepath.Abs(filepath.Dir(path)); err == nil && folder != source.GetBaseDir() {
		run += " --base-dir " + source.GetBaseDir()
	}
	return text + "next: " + s.Cyan(run) + "\n"
}

// toolsText lists the tools of MCP servers, with the names of their arguments.
func toolsText(s output.Style, tools []*planv1.Tool) string {
	var table output.Table
	for _, tool := range tools {
		var schema struct {
			Properties map[string]any `json:"properties"`
		}
		_ = json.Unmarshal([]byte(tool.GetParametersJson()), &schema) // another schema has no names to show
		names := strings.Join(slices.Sorted(maps.Keys(schema.Properties)), ", ")
		first, _, _ := strings.Cut(strings.TrimSpace(tool.GetDescription()), "\n")
		table.Row("  tool", tool.GetServer()+": "+tool.GetName()+"("+names+")", s.Dim(output.Short(tool.GetDigest())), first)
	}
	return table.String()
}

// settingsText lists settings, each with its origin.
func settingsText(s output.Style, settings []*planv1.Setting) string {
	origins := map[planv1.SettingOrigin]string{
		planv1.SettingOrigin_SETTING_ORIGIN_DEFAULT: s.Dim("default"), planv1.SettingOrigin_SETTING_ORIGIN_SET: "set",
		planv1.SettingOrigin_SETTING_ORIGIN_COMPUTED: "computed",
	}
	var table output.Table
	for _, setting := range settings {
		value := setting.GetValue()
		if value == "" {
			value = "-"
		}
		table.Row("  "+setting.GetKey(), value, origins[setting.GetOrigin()], s.Dim(setting.GetNote()))
	}
	return table.String()
}

// rowsText describes the rows of a dataset: how many it has, and what `data.overlong` did.
func rowsText(in *planv1.Input) string {
	if in.GetRows() == 0 {
		return ""
	}
	text := output.Plural(in.GetRows(), "row")
	if n := in.GetDropped(); n > 0 {
		text += fmt.Sprintf(", %s too long and dropped", output.Count(n))
	}
	if n := in.GetTruncated(); n > 0 {
		text += fmt.Sprintf(", %s too long and truncated", output.Count(n))
	}
	return text
}

// sourceText names where rows come from, such as `math: openai/gsm8k@e53f048, main, train`.
func sourceText(source *planv1.Source) string {
	text := source.GetPath()
	if revision := source.GetRevision(); revision != "" {
		text += "@" + revision[:min(7, len(revision))]
	}
	for _, part := range []string{source.GetSubset(), source.GetSplit()} {
		if part != "" {
			text += ", " + part
		}
	}
	if n := len(source.GetFiles()); n > 1 {
		text += fmt.Sprintf(", %d files", n)
	}
	if source.GetName() != "" {
		text = source.GetName() + ": " + text
	}
	return text
}

func takenText(source *planv1.Source) string {
	if source.GetTaken() == source.GetRows() {
		return output.Plural(source.GetRows(), "row")
	}
	return fmt.Sprintf("%s of %s", output.Count(source.GetTaken()), output.Plural(source.GetRows(), "row"))
}

func roleName(role planv1.InputRole) string {
	switch role {
	case planv1.InputRole_INPUT_ROLE_TRAIN_DATA:
		return "train"
	case planv1.InputRole_INPUT_ROLE_EVAL_DATA:
		return "eval"
	case planv1.InputRole_INPUT_ROLE_SUITE_DATA:
		return "suite"
	case planv1.InputRole_INPUT_ROLE_MODEL:
		return "model"
	case planv1.InputRole_INPUT_ROLE_REWARD:
		return "reward"
	case planv1.InputRole_INPUT_ROLE_ENVIRONMENT:
		return "environment"
	}
	return "?"
}

// writeFile replaces a file atomically.
func writeFile(path string, data []byte) error {
	err := atomicfile.Write(path, data, 0o644)
	if err != nil {
		return exit.New(exit.CannotMake, "name another file with -o", "cannot write %s: %w", path, cli.PathCause(err))
	}
	return nil
}
