package live

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// cancelTimeout is the timeout of a request to stop the run.
const cancelTimeout = 10 * time.Second

// Watcher shows a run while it is active.
type Watcher struct {
	Client     *client.Client
	RunID      string
	Out        io.Writer
	In         io.Reader // keys, if Out is a terminal
	Terminal   bool
	JSON       bool
	Style      output.Style
	Zone       *time.Location
	Interrupts <-chan os.Signal
}

// Outcome is how watching ended.
type Outcome struct {
	Run      *Run
	Detached bool // the user detached; the run continues
	Stopped  bool // the user asked the run to stop
}

// Watch shows the run until it is over, the user detaches, or the server is lost. The first
// interrupt stops the run after the current step, the second stops it immediately, the third
// detaches.
func (w *Watcher) Watch(ctx context.Context) (*Outcome, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	updates := Follow(ctx, w.Client, w.RunID)
	if w.Terminal && !w.JSON {
		return w.screen(ctx, updates)
	}
	return w.lines(ctx, updates)
}

// lines prints a line per event.
func (w *Watcher) lines(ctx context.Context, updates <-chan Update) (*Outcome, error) {
	outcome := &Outcome{Run: &Run{}}
	interrupts := 0
	clock := time.NewTicker(time.Second)
	defer clock.Stop()
	var stall stall
	for {
		select {
		case now := <-clock.C:
			if line := stall.line(outcome.Run.Status, now, w.Style, w.Zone); line != "" && !w.JSON {
				fmt.Fprintln(w.Out, line)
			}
		case <-w.Interrupts:
			interrupts++
			if interrupts > 2 {
				outcome.Detached = true
				return outcome, nil
			}
			outcome.Stopped = true
			if !w.JSON {
				fmt.Fprintln(w.Out, stopping(interrupts))
			}
			if err := w.stop(ctx, interrupts == 1); err != nil {
				return outcome, err
			}
		case u := <-updates:
			switch {
			case u.Err != nil:
				return outcome, u.Err
			case u.Done:
				if line := outcome.Run.LastLines(w.Style, w.Zone); line != "" && !w.JSON {
					fmt.Fprintln(w.Out, line)
				}
				return outcome, nil
			case u.Status != nil:
				w.printStatus(outcome.Run, u.Status)
				outcome.Run.Update(u.Status)
			case u.Event != nil:
				outcome.Run.Add(u.Event)
				w.printEvent(outcome.Run, u.Event)
			default:
				for _, e := range u.History {
					outcome.Run.Add(e)
				}
			}
		}
	}
}

// stall reports long waits: after stallFirst, then each time the duration has doubled.
type stall struct {
	since time.Time     // start of the current wait
	next  time.Duration // duration at which it is reported next
}

const stallFirst = 10 * time.Second

func (t *stall) line(status *runv1.RunStatus, now time.Time, s output.Style, zone *time.Location) string {
	since := status.GetWaitingSince()
	if since == nil || status.GetWaitingFor() == "" {
		return ""
	}
	if began := since.AsTime(); !began.Equal(t.since) {
		t.since, t.next = began, stallFirst
	}
	spent := now.Sub(t.since)
	if spent < t.next {
		return ""
	}
	t.next *= 2
	return fmt.Sprintf("%s %s waits for %s  %s so far", s.Dim(clock(now, zone)), s.Yellow("still"), status.GetWaitingFor(), output.Duration(spent.Truncate(time.Second)))
}

// printStatus prints the first status; later changes are printed as events.
func (w *Watcher) printStatus(r *Run, status *runv1.RunStatus) {
	if w.JSON {
		_ = output.Line(w.Out, "status", status)
		return
	}
	if r.Status == nil {
		run := status.GetRun()
		fmt.Fprintf(w.Out, "%s %s is %s, %s of %s steps; logs in %s\n", run.GetName(), run.GetRunId(), State(run.GetState()),
			output.Count(run.GetStep()), output.Count(run.GetTotalSteps()), run.GetDirectory())
	}
}

func (w *Watcher) printEvent(r *Run, e *eventv1.Event) {
	if w.JSON {
		_ = output.Line(w.Out, "event", e)
		return
	}
	if line := r.Line(e, w.Style, w.Zone); line != "" {
		fmt.Fprintln(w.Out, line)
	}
}

// stop asks the scheduler to end the run.
func (w *Watcher) stop(ctx context.Context, drain bool) error {
	ctx, cancel := context.WithTimeout(ctx, cancelTimeout)
	defer cancel()
	_, err := w.Client.Scheduler.CancelRun(ctx, &runv1.CancelRunRequest{RunId: w.RunID, Drain: drain})
	return err
}

func stopping(interrupts int) string {
	if interrupts == 1 {
		return "stopping after the current step; press Ctrl-C again to stop immediately"
	}
	return "stopping immediately; press Ctrl-C again to detach"
}
