package explain

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Elapsed is a duration for people: seconds up to two minutes, then minutes, then hours.
func Elapsed(d time.Duration) string {
	switch {
	case d < 0:
		return "0 s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0f min", d.Minutes())
	}
	return fmt.Sprintf("%.1f h", d.Hours())
}

func orElse(s, other string) string { return cmp.Or(s, other) }

func steps(run *runv1.Run) string {
	if run.GetStep() == run.GetTotalSteps() {
		return fmt.Sprint(run.GetTotalSteps())
	}
	return fmt.Sprintf("%d of %d", run.GetStep(), run.GetTotalSteps())
}

// mostNamed is the number of prompts that a sentence names.
const mostNamed = 8

// prompts names prompts by their positions; total counts those that are not in the list.
func prompts(positions []uint64, total int) string {
	total = max(total, len(positions))
	shown := positions[:min(len(positions), mostNamed)]
	text := make([]string, len(shown))
	for i, p := range shown {
		text[i] = fmt.Sprint(p)
	}
	name := "prompts "
	if total == 1 {
		name = "prompt "
	}
	if more := total - len(shown); more > 0 {
		return fmt.Sprintf("%s%s and %d more", name, strings.Join(text, ", "), more)
	}
	return name + strings.Join(text, ", ")
}

func count(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}
