package scheduler

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/libs/worker"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

const (
	trackerStarts = 3                // starts of the process per run: a crash of the process itself repeats
	trackerPause  = 5 * time.Second  // between two starts
	trackerGrace  = 30 * time.Second // to write the end of the run
	// exitGrace is for how long the credentials of a run that has ended are in force: until the last
	// of its workers has exited.
	exitGrace = 2 * trackerGrace
)

// trackers runs the process that writes metrics to the trackers of the plan ([sinks]). A run does
// not depend on it. The process outlives the run by the time that it needs to write the end.
type trackers struct {
	*scope
	supervision *supervision
	limits      launch.Limits
	base        context.Context // ends when the scheduler stops
	ended       <-chan struct{} // closed when the run has ended
}

func newTrackers(s *scope, supervision *supervision, limits launch.Limits, base context.Context, ended <-chan struct{}) *trackers {
	return &trackers{scope: s, supervision: supervision, limits: limits, base: base, ended: ended}
}

func trackersWanted(s *configv1.SinksConfig) bool {
	return s.GetTensorboard() != nil || s.GetWandb() != nil || s.GetMlflow() != nil
}

// serve starts the process, and restarts it a few times after a crash. It does nothing if the plan
// has no trackers.
func (t *trackers) serve() {
	if !trackersWanted(t.board.record().GetPlan().GetConfig().GetSinks()) {
		return
	}
	for start := 1; t.once(start) && start < trackerStarts; start++ {
		timer := time.NewTimer(cmp.Or(t.limits.FirstBackoff, trackerPause))
		select {
		case <-timer.C:
		case <-t.ended:
		case <-t.base.Done():
		}
		timer.Stop()
		if t.base.Err() != nil {
			return
		}
	}
}

// once starts the process and waits until it has exited; true if it crashed.
func (t *trackers) once(start int) (crashed bool) {
	process, err := t.launch()
	if err != nil {
		t.failed("cannot be started: "+err.Error(), start)
		return true
	}
	ended, grace := t.ended, cmp.Or(t.limits.StopGrace, 2*time.Second)
	var late <-chan time.Time
	for {
		select {
		case <-process.Done():
			exit := process.Exit()
			process.Stop(0) // frees its resources
			if exit.Code == 0 {
				return false
			}
			t.failed(lastWords(exit), start)
			return true
		case <-ended:
			timer := time.NewTimer(trackerGrace)
			defer timer.Stop()
			ended, late = nil, timer.C
		case <-late:
			process.Stop(grace)
			return false
		case <-t.base.Done():
			process.Stop(grace)
			return false
		}
	}
}

func (t *trackers) launch() (launch.Process, error) {
	if err := os.MkdirAll(filepath.Join(t.board.record().GetDirectory(), "workers"), 0o700); err != nil {
		return nil, err
	}
	command, err := t.supervision.command(worker.Trackers.Name+"-0", worker.Trackers)
	if err != nil {
		return nil, err
	}
	return t.Launcher.Launch(command)
}

func lastWords(exit launch.Exit) string {
	text := exit.String()
	if n := len(exit.LastLines); n > 0 {
		text += "; its last line: " + strings.TrimSpace(exit.LastLines[n-1])
	}
	return text
}

func (t *trackers) failed(why string, start int) {
	next := "it is restarted"
	if start >= trackerStarts {
		next = "it is not restarted; `rollout export metrics " + t.run + "` writes what is missing"
	}
	t.emit(&eventv1.Event{
		Kind: "sink.failed", Level: eventv1.Level_LEVEL_WARN, Step: t.board.progress().GetStep(),
		Message:    fmt.Sprintf("the process that writes to the trackers %s; the run continues, %s", why, next),
		Attributes: map[string]string{"error": why},
	})
}
