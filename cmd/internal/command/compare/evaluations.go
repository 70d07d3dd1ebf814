package compare

import (
	"fmt"
	"os"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/evaluation"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/suite"
)

// evaluated reports whether the arguments are folders and `rollout eval` has written to one. Other
// folders may have the names of runs.
func evaluated(args []string) bool {
	written := false
	for _, folder := range args {
		if info, err := os.Stat(folder); err != nil || !info.IsDir() {
			return false
		}
		written = written || evaluation.Begun(folder)
	}
	return written
}

// evaluations compares two results of `rollout eval`.
func evaluations(env *cli.Env, folders []string) error {
	if len(folders) != 2 {
		return cli.Usage("two results of rollout eval can be compared, got %d", len(folders))
	}
	var results []*evaluation.Result
	for _, folder := range folders {
		r, err := evaluation.Read(folder)
		if err != nil {
			return err
		}
		results = append(results, r)
	}
	c, err := evaluation.Compare(results[0], results[1])
	if err != nil {
		return err
	}
	if env.JSON() {
		return output.Value(env.Stdout, c)
	}
	s := env.Style()
	var b strings.Builder
	fmt.Fprintf(&b, "A  %s\nB  %s\n\n", c.A, c.B)
	var table output.Table
	table.Row(s.Bold("suite"), s.Bold("metric"), s.Bold("A"), s.Bold("B"), s.Bold("B - A"), s.Bold("95 % interval"), s.Bold("p"), s.Bold("rows"))
	for _, one := range c.Suites {
		for _, d := range one.Metrics {
			table.Row(one.Name, evaluation.MetricName(d.Metric, d.Part), output.Number(d.A), output.Number(d.B), signed(d.Difference), interval(d), verdict(s, d), output.Count(d.Rows))
		}
	}
	b.WriteString(table.String())
	_, err = fmt.Fprint(env.Stdout, b.String())
	return err
}

func signed(v float64) string { return fmt.Sprintf("%+.3f", v) }

func interval(d suite.Difference) string {
	if d.Low == nil || d.High == nil {
		return "-"
	}
	return signed(*d.Low) + " to " + signed(*d.High)
}

// verdict is the probability of the difference between equal models, in color where it is small.
// Without a test it has the reason.
func verdict(s output.Style, d suite.Difference) string {
	if d.P == nil {
		return fmt.Sprintf("- fewer than %d rows", suite.MinClusters)
	}
	text := fmt.Sprintf("%.3f", *d.P)
	if *d.P < 0.001 {
		text = "< 0.001"
	}
	switch {
	case !d.Significant:
		return text
	case d.Difference < 0:
		return s.Red(text + " significant")
	}
	return s.Green(text + " significant")
}
