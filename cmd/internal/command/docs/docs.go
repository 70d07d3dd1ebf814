// Package docs is the hidden command that writes the reference of the command line.
package docs

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/libs/exit"
)

// Command returns the hidden command `rollout docs`, which `make docs` calls.
func Command(env *cli.Env) *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use: "docs --dir FOLDER", Short: "Write the reference of all commands as Markdown", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return exit.New(exit.CannotMake, "name another folder with --dir", "%w", err)
			}
			cmd.Root().DisableAutoGenTag = true
			if err := doc.GenMarkdownTree(cmd.Root(), dir); err != nil {
				return exit.New(exit.CannotMake, "name another folder with --dir", "%w", err)
			}
			if !env.JSON() {
				fmt.Fprintf(env.Stdout, "wrote %s\n", filepath.Join(dir, "rollout.md"))
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "`folder` to write to")
	_ = cmd.MarkFlagRequired("dir")
	return cmd
}
