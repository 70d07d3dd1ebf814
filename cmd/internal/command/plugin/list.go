package plugin

import (
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
)

func listCommand(env *cli.Env) *cobra.Command {
	var worker cli.WorkerFlag
	var folder string
	cmd := &cobra.Command{
		Use: "list", Short: "List plugins: those of rollout, of installed packages, and of manifests", Args: cobra.NoArgs,
		Long: `List the plugins that a configuration can use: those of rollout, those of packages in the Python of the workers, and those of the
manifests in a folder. Each has its kind, where it is from, version, digest, and what a configuration writes.`,
		Example: "  rollout plugin list\n  rollout plugin list --folder examples/plugins --format json",
	}
	cmd.Flags().StringVar(&folder, "folder", ".", "`folder` that is searched for manifests, three levels deep")
	worker.AddTo(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		searched, err := filepath.Abs(folder)
		if err != nil {
			return err
		}
		got, err := ask(cmd.Context(), env.Stderr, worker.Command(), map[string]any{"list": true, "folder": searched})
		if err != nil {
			return err
		}
		for i := range got.Plugins {
			p := &got.Plugins[i]
			if len(p.Packages) == 0 {
				continue
			}
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
		table.Row(s.Bold("KIND"), s.Bold("NAME"), s.Bold("FROM"), s.Bold("VERSION"), s.Bold("DIGEST"), s.Bold("USE"))
		for _, p := range got.Plugins {
			table.Row(p.Kind, p.Name, p.From, p.Version, output.Short(p.Digest), use(p))
		}
		_, err = io.WriteString(env.Stdout, table.String())
		return err
	}
	return cmd
}

// use is what a configuration writes, or why it can't.
func use(p plugin) string {
	switch {
	case p.Problem != "":
		return "can't be used: " + p.Problem
	case p.Python != "":
		return p.Use + ", python = \"" + p.Python + "\""
	case len(p.Packages) > 0:
		return p.Use + ", after `rollout plugin install " + p.Name + "` (" + versions(p.Packages) + ")"
	}
	return p.Use
}

// relative is a path as the user would write it here.
func relative(path string) string {
	here, err := os.Getwd()
	if err != nil {
		return path
	}
	if rel, err := filepath.Rel(here, path); err == nil && !strings.HasPrefix(rel, "..") {
		return rel
	}
	return path
}
