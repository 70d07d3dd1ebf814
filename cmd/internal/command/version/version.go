// Package version is the command `rollout version`.
package version

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
)

// Command returns `rollout version`.
func Command(env *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: "  rollout version --format json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if env.JSON() {
				return output.Value(env.Stdout, map[string]string{
					"version": env.Version, "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH,
				})
			}
			_, err := fmt.Fprint(env.Stdout, Text(env))
			return err
		},
	}
}

// Text is the line that `rollout version` and `rollout --version` print.
func Text(env *cli.Env) string {
	return fmt.Sprintf("rollout %s (%s, %s/%s)\n", env.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
