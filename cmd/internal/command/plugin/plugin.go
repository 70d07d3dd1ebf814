// Package plugin has the commands `rollout plugin ...`.
package plugin

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
)

const pluginLong = `Make, test, list, and install plugins. A configuration can use rewards, environments, tools, and data sources. It names a plugin by
its file, file.py:NAME, by the manifest of a sidecar, plugin.toml:NAME, or by the package that has it, DISTRIBUTION:NAME. Evaluations,
advantage estimators, and losses can be made and tested, but no configuration uses them yet.`

// Command returns `rollout plugin`.
func Command(env *cli.Env) *cobra.Command {
	cmd := cli.Group("plugin", "Make, test, list, and install plugins", newCommand(env), testCommand(env), listCommand(env), installCommand(env))
	cmd.Long = pluginLong
	cmd.Example = `  rollout plugin new reward word_count
  rollout plugin test word_count/word_count.py:word_count
  rollout plugin list
  rollout plugin install gymnasium`
	return cmd
}

const installLong = `Install what a plugin needs.

Environments such as gymnasium, and the libraries of suites, inspect_ai and lm_eval, need versions of packages that exclude each other
and those of the learner. Each gets a separate Python environment, from a lock with hashes that is part of rollout, and its interpreter
is printed for the configuration. One that is up to date is kept.

Any other NAME is a package with plugins: a requirement, a wheel, or a folder. It is installed with pip into the Python of the workers,
whose packages keep their versions.`

func installCommand(env *cli.Env) *cobra.Command {
	var worker cli.WorkerFlag
	var folder string
	var again bool
	cmd := &cobra.Command{
		Use: "install NAME", Short: "Install a package with plugins, or the packages of an environment", Args: cobra.ExactArgs(1), Long: installLong,
		Example: "  rollout plugin install gymnasium\n  rollout plugin install gymnasium --folder /opt/gymnasium --again\n  rollout plugin install ./word_count",
	}
	cmd.Flags().StringVar(&folder, "folder", "", "`folder` of the Python environment of an environment (default: plugins/NAME in the state folder)")
	cmd.Flags().BoolVar(&again, "again", false, "install it again, although it is up to date")
	worker.AddTo(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		target, err := folderOf(env, folder, args[0])
		if err != nil {
			return err
		}
		here, err := os.Getwd()
		if err != nil {
			return err
		}
		env.Note("installing %s", args[0])
		got, err := ask(cmd.Context(), env.Stderr, worker.Command(), map[string]any{"install": args[0], "folder": target, "base_dir": here, "again": again})
		if err != nil {
			return err
		}
		if got.Package != nil {
			return installed(env, got)
		}
		if env.JSON() {
			return output.Value(env.Stdout, map[string]any{"name": args[0], "packages": got.Packages, "python": got.Python})
		}
		table := "[environment]"
		if got.Suite {
			table = "[eval.suites.NAME]"
		}
		_, err = fmt.Fprintf(env.Stdout, "%s\nkind = %q\npython = %q # %s\n", table, cmp.Or(got.Kind, args[0]), got.Python, versions(got.Packages))
		return err
	}
	return cmd
}

// installed prints the plugins of a package.
func installed(env *cli.Env, got *answer) error {
	if env.JSON() {
		return output.Value(env.Stdout, map[string]any{"package": got.Package, "plugins": got.Plugins})
	}
	if _, err := fmt.Fprintf(env.Stdout, "%s %s\n", got.Package.Name, got.Package.Version); err != nil {
		return err
	}
	for _, p := range got.Plugins {
		use := p.Use
		if p.Problem != "" {
			use = p.Problem
		}
		if _, err := fmt.Fprintf(env.Stdout, "  %s %s: %s\n", p.Kind, p.Name, use); err != nil {
			return err
		}
	}
	return nil
}

// folderOf returns the absolute path of the Python environment of an environment.
func folderOf(env *cli.Env, folder, name string) (string, error) {
	if folder != "" {
		return filepath.Abs(folder)
	}
	state, err := env.Plane.StateDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(state, "plugins", strings.ReplaceAll(filepath.Base(name), "-", "_")), nil
}
