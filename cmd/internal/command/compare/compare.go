// Package compare has the command `rollout compare`.
package compare

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/cmd/internal/report"
)

// The size of the chart on a terminal.
const (
	chartWidth  = 72
	chartHeight = 12
)

// Command returns `rollout compare`.
func Command(env *cli.Env) *cobra.Command {
	var metric, page, picture string
	cmd := &cobra.Command{
		Use:   "compare RUN RUN... | FOLDER FOLDER",
		Short: "Compare runs, or two results of rollout eval",
		Long: `Compare runs: the curves of a metric in one chart, the first and the last evaluation, the throughput, and the settings that differ,
defaults included. Inputs with different content, such as a changed dataset, count as settings.

--html writes a page with the curves of all metrics; it needs no network. --png writes the curves of one metric.

Two folders that "rollout eval" has written are compared by the rows that both have: the difference of each metric, its interval of
95 %, and p, the probability of a difference at least as large between equal models.

` + cli.FolderHelp + " " + cli.RunHelp,
		Example: `  rollout compare addition-grpo addition-dapo
  rollout compare run-01kapq3n run-01kapr4p --metric eval/accuracy
  rollout compare addition-grpo addition-dapo --html compare.html --png compare.png
  rollout compare addition-grpo addition-dapo --format json
  rollout compare eval-before eval-after`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if evaluated(args) {
				return evaluations(env, args)
			}
			return env.Plane.Browse(cmd, func(ctx context.Context, r record.Reader) error {
				var runs []*report.Data
				for _, name := range args {
					data, err := report.Gather(ctx, r, name)
					if err != nil {
						return err
					}
					runs = append(runs, data)
				}
				c, err := report.Compare(runs, metric)
				if err != nil {
					return err
				}
				files := map[string]func(io.Writer) error{page: c.HTML, picture: c.PNG}
				delete(files, "")
				for path, draw := range files {
					if err := report.WriteFile(path, draw); err != nil {
						return err
					}
					env.Note("wrote %s", path)
				}
				return show(env, c)
			})
		},
	}
	cmd.Flags().StringVar(&metric, "metric", "", "`metric` of the curves (default: the reward, else the loss)")
	cmd.Flags().StringVar(&page, "html", "", "`file` for a page with all curves")
	cmd.Flags().StringVar(&picture, "png", "", "`file` for a picture of the curves")
	_ = cmd.MarkFlagFilename("html", "html")
	_ = cmd.MarkFlagFilename("png", "png")
	return cmd
}

func show(env *cli.Env, c *report.Comparison) error {
	differences := c.Differences()
	if env.JSON() {
		return output.Value(env.Stdout, document(c, differences))
	}
	s := env.Style()
	var b strings.Builder
	var runs output.Table
	for i, d := range c.Runs {
		run := d.Run.Status.GetRun()
		runs.Row(c.Legend(i, env.Color), run.GetRunId(), live.State(run.GetState()))
	}
	b.WriteString(runs.String())
	if chart := c.Chart(chartWidth, chartHeight, env.Color); chart != "" {
		fmt.Fprintf(&b, "\n%s by step\n%s", s.Bold(c.Metric), chart)
	}
	table(&b, s, "held-out", c.Labels, c.EvaluationRows())
	table(&b, s, "throughput", c.Labels, c.ThroughputRows())
	var rows []report.Row
	for _, d := range differences {
		rows = append(rows, report.Row{Name: d.Key, Cells: d.Values})
	}
	table(&b, s, "settings", c.Labels, rows)
	if len(rows) == 0 {
		b.WriteString("\nthe configurations and the content of their inputs are equal\n")
	}
	_, err := fmt.Fprint(env.Stdout, b.String())
	return err
}

// table writes a table with a column per run; nothing without rows.
func table(b *strings.Builder, s output.Style, title string, labels []string, rows []report.Row) {
	if len(rows) == 0 {
		return
	}
	var t output.Table
	head := []string{s.Bold(title)}
	for _, label := range labels {
		head = append(head, s.Bold(label))
	}
	t.Row(head...)
	for _, row := range rows {
		cells := []string{row.Name}
		for _, cell := range row.Cells {
			if cell == "" {
				cell = "-"
			}
			cells = append(cells, cell)
		}
		t.Row(cells...)
	}
	b.WriteString("\n" + t.String())
}

// runDocument is one run in the JSON document.
type runDocument struct {
	RunID      string            `json:"run_id"`
	Name       string            `json:"name"`
	State      string            `json:"state"`
	Step       uint64            `json:"step"`
	TotalSteps uint64            `json:"total_steps"`
	Throughput report.Throughput `json:"throughput"`
	Curve      report.Series     `json:"curve"`
}

func document(c *report.Comparison, differences []report.Difference) map[string]any {
	var runs []runDocument
	speed := c.Throughput()
	for i, d := range c.Runs {
		run := d.Run.Status.GetRun()
		runs = append(runs, runDocument{
			run.GetRunId(), run.GetName(), live.State(run.GetState()), run.GetStep(), run.GetTotalSteps(), speed[i], c.Curve(i),
		})
	}
	return map[string]any{"runs": runs, "metric": c.Metric, "evaluations": c.Evaluations(), "settings": differences}
}
