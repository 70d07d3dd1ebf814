// Package recipe has the command `rollout init`, which writes the files of a first run.
package recipe

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"text/template"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
)

// recipes has a folder per recipe. run.toml is a template over settings; the other files are
// copied.
//
//go:embed recipes
var recipes embed.FS

const configFile = "run.toml"

// names are the recipes, in the order of the help text.
var names = []string{"grpo-math", "sft-chat", "dpo", "rm", "agent"}

// Command returns `rollout init`.
func Command(env *cli.Env) *cobra.Command {
	var name, model string
	var force bool
	cmd := &cobra.Command{
		Use:   "init [DIR] --recipe NAME",
		Short: "Write a configuration, a reward, and sample data to start from",
		Long: `Write a commented configuration (run.toml), a reward where the recipe needs one (reward.py), and a few sample rows (data/) into DIR,
the current folder by default. With --model, ` + "`rollout plan --config run.toml`" + ` passes as written; without it, fill in model.path first.

Recipes:

  grpo-math  reinforcement learning (GRPO) on questions with a number as the answer
  sft-chat   supervised fine-tuning on conversations
  dpo        preference training (DPO) on pairs of completions
  rm         a reward model from pairs of completions
  agent      reinforcement learning of tool calls, one call per episode

Existing files are not replaced, unless --force is set.`,
		Example: `  rollout init --recipe grpo-math --model models/Qwen3-0.6B
  rollout init tickets --recipe sft-chat
  rollout init --recipe dpo --force`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if err := cli.OneOf("recipe", []string{name}, names); err != nil {
				return err
			}
			folder := "."
			if len(args) == 1 {
				folder = args[0]
			}
			settings, err := settingsFor(name, model)
			if err != nil {
				return err
			}
			written, err := write(name, folder, settings, force)
			if err != nil {
				return err
			}
			return show(env, name, folder, settings, written)
		},
	}
	cmd.Flags().StringVarP(&name, "recipe", "r", "", "`recipe`: "+strings.Join(names, ", "))
	cmd.Flags().StringVarP(&model, "model", "m", "", "`folder` of a model in the Hugging Face layout, or its name on the hub (default: to fill in)")
	cmd.Flags().BoolVar(&force, "force", false, "replace existing files")
	_ = cmd.MarkFlagRequired("recipe")
	_ = cmd.RegisterFlagCompletionFunc("recipe", cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.MarkFlagDirname("model")
	return cmd
}

// settings are the values of the template of a configuration.
type settings struct {
	Model     string // "": to fill in
	Chat      bool   // the model has a chat template, or is not known
	Context   int    // tokens of prompt and completion
	MaxTokens int    // tokens of a completion
}

// settingsFor returns the settings of a recipe that fit the model.
func settingsFor(recipe, model string) (settings, error) {
	s := settings{Chat: true, Context: 1024, MaxTokens: 256}
	if model == "" {
		return s, nil
	}
	if info, err := os.Stat(model); err != nil || !info.IsDir() {
		if onHub(model) {
			s.Model = model
			return s, nil
		}
		return s, exit.New(exit.NoInput, "give a folder in the Hugging Face layout, or a name on the hub such as Qwen/Qwen3-0.6B",
			"--model: %s is not a folder", model)
	}
	var err error
	if s.Model, err = filepath.Abs(model); err != nil {
		return s, err
	}
	var config struct {
		Positions int `json:"max_position_embeddings"`
	}
	text, err := os.ReadFile(filepath.Join(model, "config.json"))
	if err != nil {
		return s, exit.New(exit.NoInput, "give a folder in the Hugging Face layout", "--model: cannot read config.json in %s: %w", model, cli.PathCause(err))
	}
	if json.Unmarshal(text, &config) == nil && config.Positions > 0 { // `rollout plan` reports a damaged file
		s.Context = min(s.Context, config.Positions)
		s.MaxTokens = min(s.MaxTokens, s.Context/2)
	}
	if s.Chat = hasChatTemplate(model); !s.Chat && recipe == "sft-chat" {
		return s, exit.New(exit.Data, "choose an instruct or chat model, or another recipe", "the recipe sft-chat needs a chat template, and %s has none", model)
	}
	return s, nil
}

// onHub reports whether a text has the form of a repository on the hub: owner/name.
func onHub(model string) bool {
	owner, name, found := strings.Cut(model, "/")
	return found && owner != "" && name != "" && !strings.ContainsAny(name, "/") && !strings.HasPrefix(owner, ".") && owner != "~"
}

// hasChatTemplate reports whether the tokenizer of a model renders conversations.
func hasChatTemplate(folder string) bool {
	if _, err := os.Stat(filepath.Join(folder, "chat_template.jinja")); err == nil {
		return true
	}
	var config struct {
		Template any `json:"chat_template"`
	}
	text, err := os.ReadFile(filepath.Join(folder, "tokenizer_config.json"))
	return err == nil && json.Unmarshal(text, &config) == nil && config.Template != nil
}

// write writes the files of a recipe and returns their paths. Without force it writes nothing where
// one of them exists.
func write(recipe, folder string, s settings, force bool) ([]string, error) {
	files := map[string][]byte{}
	var paths []string
	root := path.Join("recipes", recipe)
	err := fs.WalkDir(recipes, root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := recipes.ReadFile(name)
		if err == nil && path.Base(name) == configFile {
			text, err = render(text, s)
		}
		target := filepath.Join(folder, filepath.FromSlash(strings.TrimPrefix(name, root+"/")))
		files[target], paths = text, append(paths, target)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the recipe %s: %w", recipe, err)
	}
	slices.SortFunc(paths, func(a, b string) int { // the configuration first
		return strings.Compare(strings.TrimSuffix(a, configFile), strings.TrimSuffix(b, configFile))
	})
	for _, target := range paths {
		if _, err := os.Lstat(target); !force && !errors.Is(err, fs.ErrNotExist) {
			return nil, exit.New(exit.CannotMake, "choose another folder, or replace its files with --force", "%s already exists", target)
		}
	}
	for _, target := range paths {
		err := os.MkdirAll(filepath.Dir(target), 0o755)
		if err == nil {
			err = os.WriteFile(target, files[target], 0o644)
		}
		if err != nil {
			return nil, exit.New(exit.CannotMake, "choose another folder", "cannot write %s: %w", target, cli.PathCause(err))
		}
	}
	return paths, nil
}

func render(text []byte, s settings) ([]byte, error) {
	parsed, err := template.New(configFile).Parse(string(text))
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = parsed.Execute(&b, s)
	return b.Bytes(), err
}

// show prints what was written and what to do next.
func show(env *cli.Env, recipe, folder string, s settings, written []string) error {
	if env.JSON() {
		return output.Value(env.Stdout, map[string]any{"recipe": recipe, "directory": folder, "files": written, "model": s.Model})
	}
	var b strings.Builder
	for _, file := range written {
		fmt.Fprintf(&b, "wrote %s\n", file)
	}
	config := filepath.Join(folder, configFile)
	if s.Model == "" {
		fmt.Fprintf(&b, "\nset model.path in %s, then:\n", config)
	} else {
		b.WriteString("\nnext:\n")
	}
	fmt.Fprintf(&b, "  %s  # checks everything; starts nothing\n  %s\n",
		env.Style().Cyan("rollout plan --config "+config), env.Style().Cyan("rollout run --config "+config))
	_, err := fmt.Fprint(env.Stdout, b.String())
	return err
}
