// Package report has the command `rollout report`.
package report

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/cmd/internal/report"
)

// Command returns `rollout report`.
func Command(env *cli.Env) *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use:   "report RUN",
		Short: "Write a report of a run: reward curve (PNG) and charts (HTML)",
		Long: `Write a report of a run: the reward curve (reward.png), and a page with charts of the main metrics, evaluations, sample answers and
completions (index.html). The page needs no network.

` + cli.FolderHelp + " " + cli.RunHelp,
		Example: `  rollout report addition-grpo
  rollout report addition-grpo --out report`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.Records(cmd, func(ctx context.Context, r record.Reader) error {
				data, err := report.Gather(ctx, r, args[0])
				if err != nil {
					return err
				}
				folder := out
				if folder == "" {
					folder = data.Run.Status.GetRun().GetDirectory() + "/report"
				}
				paths, err := data.Write(folder)
				if err != nil {
					return err
				}
				if env.JSON() {
					return output.Value(env.Stdout, paths)
				}
				fmt.Fprintf(env.Stdout, "curve   %s\nreport  %s\n", paths.PNG, paths.HTML)
				return nil
			})
		},
	}
	cmd.Flags().StringVarP(&out, "out", "o", "", "`folder` to write to (default: report in the folder of the run)")
	_ = cmd.MarkFlagDirname("out")
	return cmd
}
