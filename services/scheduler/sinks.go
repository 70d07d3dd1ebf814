package scheduler

import (
	"cmp"
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
	// sinkStarts is how often the process that feeds the sinks is started for a run: one that crashes by itself does so again.
	sinkStarts = 3
	// sinkPause is between two starts.
	sinkPause = 5 * time.Second
	// sinkGrace is how long the sinks may take to hear of the run's end.
	sinkGrace = 30 * time.Second
)

// feedSinks runs the process that feeds the plan's sinks, beside everything that the run needs: whatever becomes of it, the run goes
// on. It outlives the run by as much as the sinks need to hear of the end.
func (c *conductor) feedSinks() {
	if !sinksWanted(c.record().GetPlan().GetConfig().GetSinks()) {
		return
	}
	c.svc.wg.Go(func() {
		for start := 1; c.feedOnce(start) && start < sinkStarts; start++ {
			timer := time.NewTimer(cmp.Or(c.svc.cfg.Worker.Limits.FirstBackoff, sinkPause))
			select {
			case <-timer.C:
			case <-c.done:
			case <-c.svc.base.Done():
			}
			timer.Stop()
			if c.svc.base.Err() != nil {
				return
			}
		}
	})
}

func sinksWanted(s *configv1.SinksConfig) bool {
	return s.GetTensorboard() != nil || s.GetWandb() != nil || s.GetMlflow() != nil
}

// feedOnce starts the process and waits for its end; true where it crashed.
func (c *conductor) feedOnce(start int) (crashed bool) {
	process, err := c.launchSinks()
	if err != nil {
		c.sinksFailed("can't be started: "+err.Error(), start)
		return true
	}
	ended := c.done
	var late <-chan time.Time
	for {
		select {
		case <-process.Done():
			exit := process.Exit()
			process.Stop(0) // frees what is held of it
			if exit.Code == 0 {
				return false
			}
			c.sinksFailed(lastWords(exit), start)
			return true
		case <-ended:
			timer := time.NewTimer(sinkGrace)
			defer timer.Stop()
			ended, late = nil, timer.C
		case <-late:
			process.Stop(c.stopGrace())
			return false
		case <-c.svc.base.Done():
			process.Stop(c.stopGrace())
			return false
		}
	}
}

func (c *conductor) launchSinks() (launch.Process, error) {
	if err := os.MkdirAll(filepath.Join(c.record().GetDirectory(), "workers"), 0o700); err != nil {
		return nil, err
	}
	command, err := c.command(worker.Trackers.Name+"-0", worker.Trackers)
	if err != nil {
		return nil, err
	}
	return c.svc.Launcher.Launch(command)
}

// stopGrace is what a worker gets to drain.
func (c *conductor) stopGrace() time.Duration {
	return cmp.Or(c.svc.cfg.Worker.Limits.StopGrace, 2*time.Second)
}

func lastWords(exit launch.Exit) string {
	text := exit.String()
	if n := len(exit.LastLines); n > 0 {
		text += "; its last line: " + strings.TrimSpace(exit.LastLines[n-1])
	}
	return text
}

func (c *conductor) sinksFailed(why string, start int) {
	next := "it is started again"
	if start >= sinkStarts {
		next = "it is not started again; `rollout export metrics " + c.id + "` writes what is missing"
	}
	c.svc.emit(c.record(), &eventv1.Event{
		Kind: "sink.failed", Level: eventv1.Level_LEVEL_WARN, Step: c.progress().GetStep(),
		Message:    fmt.Sprintf("the process that feeds the sinks %s; the run goes on, %s", why, next),
		Attributes: map[string]string{"error": why},
	})
}
