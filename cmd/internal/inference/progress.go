package inference

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/infer"
)

// Progress prints the events and warnings of a job. On a terminal it redraws one line.
type Progress struct {
	Env  *cli.Env
	Kept int // rows that were finished before

	mu    sync.Mutex
	drawn bool // the line is on the screen
}

// Event prints an event of the worker.
func (p *Progress) Event(e infer.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e.Event {
	case "loading":
		p.draw(fmt.Sprintf("loading %s for %s rows", e.Model, output.Count(e.Rows)))
	case "begin":
		p.Clear()
		if p.Kept = e.Kept; p.Kept > 0 {
			p.Env.Note("continuing after %s of %s rows", output.Count(e.Kept), output.Count(e.Rows))
		}
	case "progress":
		p.draw(progressText(e, p.Kept))
	default:
		p.Clear()
	}
}

// Warning prints a warning of the worker. repeated: how often it was repeated, 0 for a new one.
func (p *Progress) Warning(text string, repeated int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Clear()
	if repeated > 0 {
		text = fmt.Sprintf("%s more: %s", output.Count(repeated), text)
	}
	p.Env.Note("%s", text)
}

func (p *Progress) draw(line string) {
	if p.Env.Terminal && !p.Env.JSON() {
		p.Clear()
		fmt.Fprint(p.Env.Stdout, line)
		p.drawn = true
	}
}

// Clear removes the line from the terminal.
func (p *Progress) Clear() {
	if p.drawn {
		fmt.Fprint(p.Env.Stdout, "\r\x1b[K")
		p.drawn = false
	}
}

const barWidth = 24

// progressText returns the progress of a job as one line.
func progressText(e infer.Event, kept int) string {
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
		parts = append(parts, fmt.Sprintf("reward retries: %s", output.Count(e.Retries)))
	}
	if failed := Counts(e.Failures); failed != "" {
		parts = append(parts, "failed: "+failed)
	}
	return strings.Join(parts, "  ")
}

// Counts lists counts by name.
func Counts(counts map[string]uint64) string {
	var parts []string
	for reason, n := range counts {
		parts = append(parts, fmt.Sprintf("%s %s", reason, output.Count(n)))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}
