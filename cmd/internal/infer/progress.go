package infer

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/output"
)

const barWidth = 24

// Progress is a batch as one line for people.
func Progress(e Event, kept int) string {
	share := 0.0
	if e.Of > 0 {
		share = float64(e.Rows) / float64(e.Of)
	}
	full := int(share * barWidth)
	parts := []string{
		fmt.Sprintf("%s%s %3.0f%%", strings.Repeat("█", full), strings.Repeat("░", barWidth-full), 100*share),
		fmt.Sprintf("%s of %s rows", output.Count(e.Rows), output.Count(e.Of)),
	}
	if done := e.Rows - kept; e.Seconds > 0 && done > 0 {
		rate := float64(done) / e.Seconds
		parts = append(parts, output.Number(rate)+" rows/s", output.Number(float64(e.Tokens)/e.Seconds)+" tokens/s")
		if left := e.Of - e.Rows; left > 0 {
			parts = append(parts, output.Duration(time.Duration(float64(left)/rate*float64(time.Second)))+" left")
		}
	}
	if e.MeanScore != nil {
		parts = append(parts, "mean score "+output.Number(*e.MeanScore))
	}
	if e.Retries > 0 {
		parts = append(parts, fmt.Sprintf("reward tried again: %s", output.Count(e.Retries)))
	}
	if failed := Failures(e.Failures); failed != "" {
		parts = append(parts, "failed: "+failed)
	}
	return strings.Join(parts, "  ")
}

// Loading says what is waited for before the first row.
func Loading(e Event) string {
	return fmt.Sprintf("loading %s for %s rows", e.Model, output.Count(e.Rows))
}

// Failures are samples without a result, counted by reason.
func Failures(counts map[string]uint64) string {
	var parts []string
	for reason, n := range counts {
		parts = append(parts, fmt.Sprintf("%s %s", reason, output.Count(n)))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}
