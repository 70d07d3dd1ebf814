// Package explain has the command `rollout explain`.
package explain

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/explain"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// Command returns `rollout explain`.
func Command(env *cli.Env) *cobra.Command {
	var watch bool
	var every time.Duration
	var events uint32
	cmd := &cobra.Command{
		Use:   "explain RUN",
		Short: "Explain what a run waits for, down to the root cause, or why it ended",
		Long: `Explain what a run waits for: each line is the reason of the one before it, and the last line has the fix. Every worker is asked
what it does now. Services and workers that do not answer are listed. Of a run that has ended, explain why. ` + cli.RunHelp + `

` + cli.FolderHelp,
		Example: `  rollout explain addition-grpo
  rollout explain addition-grpo --watch
  rollout explain addition-grpo --format json
  rollout explain addition-grpo --state-dir /copy/of/a/state/folder`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.Browse(cmd, func(ctx context.Context, r record.Reader) error {
				c := collector{env: env, reader: r, name: args[0], events: int(events)}
				if !watch {
					return c.once(ctx)
				}
				return c.watch(ctx, every)
			})
		},
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "explain again when the cause changes, until the run ends")
	cmd.Flags().DurationVar(&every, "interval", 2*time.Second, "`time` between two looks with --watch")
	cmd.Flags().Uint32VarP(&events, "events", "n", 10, "`number` of last events to show")
	return cmd
}

func (c *collector) once(ctx context.Context) error {
	state, err := c.collect(ctx)
	if err != nil {
		return err
	}
	found := c.explain(state)
	return c.env.Message(found, func() string { return text(c.env, found) })
}

// explain explains a state, with the events that were asked for.
func (c *collector) explain(s explain.State) *waitv1.Explanation {
	found := explain.Of(s)
	found.Events = found.GetEvents()[max(0, len(found.GetEvents())-c.events):]
	return found
}

// watch explains again whenever the chain names another cause, until the run ends.
func (c *collector) watch(ctx context.Context, every time.Duration) error {
	last := ""
	for {
		state, err := c.collect(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		found := c.explain(state)
		if now := cause(found); now != last {
			last = now
			if err := c.show(found); err != nil {
				return err
			}
		}
		if explain.Ended(state) {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(max(every, 100*time.Millisecond)):
		}
	}
}

func (c *collector) show(found *waitv1.Explanation) error {
	if c.env.JSON() {
		return output.Line(c.env.Stdout, "", found)
	}
	_, err := fmt.Fprint(c.env.Stdout, text(c.env, found)+"\n")
	return err
}

// cause identifies a chain without the durations in its sentences.
func cause(e *waitv1.Explanation) string {
	var b strings.Builder
	b.WriteString(e.GetState())
	for _, w := range e.GetChain() {
		fmt.Fprintf(&b, "|%s %s", w.GetOwner(), w.GetReason())
	}
	return b.String()
}

// text shows an explanation.
func text(env *cli.Env, e *waitv1.Explanation) string {
	s := env.Style()
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", strings.Join(slices.DeleteFunc([]string{s.Bold(e.GetName()), s.Dim(e.GetRunId()), e.GetState()}, func(part string) bool { return part == "" }), "  "))
	fix := ""
	for n, w := range e.GetChain() {
		line := w.GetEvidence()
		if since := waited(w, e); since != "" && n < len(e.GetChain())-1 {
			line += s.Dim("  " + since)
		}
		arrow := "because "
		if n == 0 {
			arrow = ""
		}
		fmt.Fprintf(&b, "%s%s%s\n", strings.Repeat("  ", n), s.Dim(arrow), strings.ReplaceAll(line, "\n", "\n"+strings.Repeat("  ", n+1)))
		if w.GetFix() != "" {
			fix = w.GetFix()
		}
	}
	if fix != "" {
		fmt.Fprintf(&b, "%s %s\n", s.Green("fix:"), fix)
	}
	for _, w := range e.GetOthers() {
		fmt.Fprintf(&b, "also: %s\n", w.GetEvidence())
	}
	for _, u := range e.GetUnanswered() {
		fmt.Fprintf(&b, "%s did not answer: %s\n", s.Yellow(u.GetName()), u.GetError())
	}
	if len(e.GetEvents()) > 0 {
		b.WriteString("last events:\n")
	}
	for _, event := range e.GetEvents() {
		fmt.Fprintf(&b, "  %s  %s\n", s.Dim(env.Time(event.GetTime().AsTime())), eventText(event))
	}
	return b.String()
}

func waited(w *waitv1.Wait, e *waitv1.Explanation) string {
	if w.GetSince() == nil {
		return ""
	}
	spent := e.GetTime().AsTime().Sub(w.GetSince().AsTime())
	if spent < 2*time.Second {
		return ""
	}
	return "for " + explain.Elapsed(spent)
}

func eventText(e *eventv1.Event) string {
	message := e.GetMessage()
	if message == "" {
		message = strings.TrimSpace(e.GetAttributes()["state"] + " " + e.GetAttributes()["phase"])
	}
	if first, _, more := strings.Cut(message, "\n"); more {
		message = first + " ..."
	}
	where := e.GetService() + " " + e.GetKind()
	if e.GetStep() > 0 {
		where += fmt.Sprintf(" (step %d)", e.GetStep())
	}
	return strings.TrimSuffix(where+": "+message, ": ")
}
