package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/rollout-rl/rollout/cmd/internal/exit"
	"github.com/rollout-rl/rollout/cmd/internal/output"
)

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: "  rollout version --format json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if a.format == formatJSON {
				return output.Value(a.stdout, map[string]string{
					"version": version, "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH,
				})
			}
			_, err := fmt.Fprintf(a.stdout, "rollout %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
}

// docsCommand writes the reference of the command line; `make docs` calls it.
func (a *app) docsCommand() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use: "docs --dir FOLDER", Short: "Write the reference of all commands as Markdown", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return exit.New(exit.CannotMake, "name another folder with --dir", "%w", err)
			}
			if err := doc.GenMarkdownTree(cmd.Root(), dir); err != nil {
				return exit.New(exit.CannotMake, "name another folder with --dir", "%w", err)
			}
			if a.format != formatJSON {
				fmt.Fprintf(a.stdout, "wrote %s\n", filepath.Join(dir, "rollout.md"))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "`folder` to write to")
	_ = cmd.MarkFlagRequired("dir")
	return cmd
}
