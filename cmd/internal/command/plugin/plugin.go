// Package plugin has the commands `rollout plugin ...`.
package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
)

const pluginLong = `Install the packages that an environment of a run needs.

Environments such as gymnasium need versions of packages that exclude each other and those of the learner. Each gets a separate Python
environment, from a lock with hashes that is part of rollout. A run uses it if the configuration names its interpreter:

  [environment]
  kind = "gymnasium"
  python = "plugins/gymnasium/bin/python"`

// Command returns `rollout plugin`.
func Command(env *cli.Env) *cobra.Command {
	cmd := cli.Group("plugin", "Install the packages of environments", installCommand(env), listCommand(env))
	cmd.Long = pluginLong
	cmd.Example = `  rollout plugin list
  rollout plugin install gymnasium
  rollout plugin install reasoning_gym --folder plugins/reasoning_gym`
	return cmd
}

// plugin is an environment and the packages that it is for.
type plugin struct {
	Name     string            `json:"name"`
	Packages map[string]string `json:"packages"` // name -> version
	Python   string            `json:"python,omitempty"`
}

// answer is what the worker prints.
type answer struct {
	Plugins  []plugin          `json:"plugins"`
	Python   string            `json:"python"`
	Packages map[string]string `json:"packages"`
	Error    *struct {
		Reason  string `json:"reason"`
		Message string `json:"message"`
		Fix     string `json:"fix"`
	} `json:"error"`
}

func installCommand(env *cli.Env) *cobra.Command {
	var worker cli.WorkerFlag
	var folder string
	var again bool
	cmd := &cobra.Command{
		Use: "install NAME", Short: "Install the packages of an environment", Args: cobra.ExactArgs(1),
		Long: `Install the packages of the environment NAME into a separate Python environment, and print its interpreter for the
configuration. One that is up to date is kept.`,
		Example: "  rollout plugin install gymnasium\n  rollout plugin install gymnasium --folder /opt/gymnasium --again",
	}
	cmd.Flags().StringVar(&folder, "folder", "", "`folder` of the Python environment (default: plugins/NAME in the state folder)")
	cmd.Flags().BoolVar(&again, "again", false, "install it again, although it is up to date")
	worker.AddTo(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		target, err := folderOf(env, folder, args[0])
		if err != nil {
			return err
		}
		env.Note("installing the packages of %s into %s", args[0], target)
		got, err := ask(cmd.Context(), env.Stderr, worker.Command(), map[string]any{"install": args[0], "folder": target, "again": again})
		if err != nil {
			return err
		}
		if env.JSON() {
			return output.Value(env.Stdout, plugin{Name: args[0], Packages: got.Packages, Python: got.Python})
		}
		_, err = fmt.Fprintf(env.Stdout, "[environment]\nkind = %q\npython = %q # %s\n", args[0], got.Python, versions(got.Packages))
		return err
	}
	return cmd
}

func listCommand(env *cli.Env) *cobra.Command {
	var worker cli.WorkerFlag
	cmd := &cobra.Command{
		Use: "list", Short: "List the environments with packages", Args: cobra.NoArgs,
		Example: "  rollout plugin list\n  rollout plugin list --format json",
	}
	worker.AddTo(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		got, err := ask(cmd.Context(), env.Stderr, worker.Command(), map[string]any{"list": true})
		if err != nil {
			return err
		}
		for i := range got.Plugins {
			p := &got.Plugins[i]
			target, err := folderOf(env, "", p.Name)
			if err != nil {
				return err
			}
			if python := filepath.Join(target, "bin", "python"); exists(python) {
				p.Python = python
			}
		}
		if env.JSON() {
			return output.Value(env.Stdout, map[string]any{"plugins": got.Plugins})
		}
		s := env.Style()
		var table output.Table
		table.Row(s.Bold("NAME"), s.Bold("PACKAGES"), s.Bold("INSTALLED IN THE STATE FOLDER"))
		for _, p := range got.Plugins {
			installed := "no"
			if p.Python != "" {
				installed = p.Python
			}
			table.Row(p.Name, versions(p.Packages), installed)
		}
		_, err = io.WriteString(env.Stdout, table.String())
		return err
	}
	return cmd
}

// folderOf returns the absolute path of the Python environment of a plugin.
func folderOf(env *cli.Env, folder, name string) (string, error) {
	if folder != "" {
		return filepath.Abs(folder)
	}
	state, err := env.Plane.StateDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(state, "plugins", filepath.Base(name)), nil
}

// ask runs `rollout-worker plugin`. log gets the lines of pip.
func ask(ctx context.Context, log io.Writer, command []string, request map[string]any) (*answer, error) {
	scratch, err := os.MkdirTemp("", "rollout-plugin-")
	if err != nil {
		return nil, exit.New(exit.CannotMake, "set TMPDIR to a folder with space", "make a temporary folder: %w", err)
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	text, err := json.Marshal(request)
	spec := filepath.Join(scratch, "request.json")
	if err == nil {
		err = os.WriteFile(spec, text, 0o600)
	}
	if err != nil {
		return nil, exit.New(exit.CannotMake, "", "write the worker's request: %w", err)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, command[0], append(command[1:], "plugin", "--spec", spec)...)
	cmd.Stdout, cmd.Stderr = &out, log
	failed := cmd.Run()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var got answer
	switch err := json.Unmarshal(out.Bytes(), &got); {
	case err == nil && got.Error != nil:
		return nil, &exit.Error{Code: exit.Unavailable, Reason: got.Error.Reason, Fix: got.Error.Fix, Err: errors.New(got.Error.Message)}
	case failed != nil:
		return nil, exit.New(exit.Unavailable, "see the lines above, or name another command with --worker", "%s: %w", strings.Join(command, " "), failed)
	case err != nil:
		return nil, exit.New(exit.Software, "name another command with --worker", "%s printed no answer: %w", strings.Join(command, " "), err)
	}
	return &got, nil
}

func versions(packages map[string]string) string {
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(packages)) {
		texts = append(texts, name+" "+packages[name])
	}
	return strings.Join(texts, ", ")
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
