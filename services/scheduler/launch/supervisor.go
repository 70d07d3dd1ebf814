package launch

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// Limits are the patience of a supervisor.
type Limits struct {
	Restarts     int           // restarts within Window that are allowed; one more is a crash loop
	Window       time.Duration // 0: 10 minutes
	StartTimeout time.Duration // a process that has not registered by then is ended and counts as crashed
	AbsentFor    time.Duration // a process that served and is in the registry no more for so long is ended and counts as crashed. 0: 30 s
	StopGrace    time.Duration // between asking to leave and ending hard; what a worker has in hand is made again. 0: 2 s
	FirstBackoff time.Duration // before the first restart; doubles up to MaxBackoff, anew after a calm Window; 0: 100 ms
	MaxBackoff   time.Duration // 0: 15 s
}

func (l Limits) withDefaults() Limits {
	set := func(d *time.Duration, to time.Duration) {
		if *d == 0 {
			*d = to
		}
	}
	set(&l.Window, 10*time.Minute)
	set(&l.StartTimeout, 5*time.Minute)
	set(&l.AbsentFor, 30*time.Second)
	set(&l.StopGrace, 2*time.Second)
	set(&l.FirstBackoff, 100*time.Millisecond)
	set(&l.MaxBackoff, 15*time.Second)
	return l
}

// startGrace is the grace of a process that has not registered.
const startGrace = time.Second

// Observer hears what happens to a worker, from the goroutine of its supervisor.
type Observer interface {
	Started(worker string, pid int, restarts int)
	// Exited tells of an exit that nobody asked for; why is one line.
	Exited(worker string, pid int, exit Exit, why string)
}

// Supervisor keeps one worker running.
//
//	starting --registered--> serving --exit--> waiting --backoff--> starting
//	    |  exit, or StartTimeout     ^ or AbsentFor ^ |
//	    +-----------------------------------------+ +--too many restarts--> CrashLoop
type Supervisor struct {
	Worker   string
	Launcher Launcher
	Limits   Limits
	Observer Observer
	// Prepare gives the command anew before each start, so that it names the newest weights.
	Prepare func(ctx context.Context) (Command, error)
	// Registered returns nil when the process with that id serves; it blocks until then or until ctx ends.
	Registered func(ctx context.Context, pid int) error
	// Absent returns nil when that process has been out of the registry for so long; it blocks until then or until ctx ends.
	Absent func(ctx context.Context, pid int, patience time.Duration) error
}

// CrashLoop says that a worker was restarted too often, or that it would end the same way each time.
type CrashLoop struct {
	Worker    string
	Restarts  int
	Window    time.Duration
	Why       string
	Refused   bool // it said that it would end the same way
	LastLines []string
}

func (e *CrashLoop) Error() string {
	text := fmt.Sprintf("%s crashed %d times within %v; the last time it %s", e.Worker, e.Restarts, e.Window, e.Why)
	if e.Refused {
		text = fmt.Sprintf("%s %s", e.Worker, e.Why)
	}
	if len(e.LastLines) > 0 {
		text += "; its last lines:\n  " + strings.Join(e.LastLines, "\n  ")
	}
	return text
}

// Run keeps the worker running until ctx ends (then it is stopped and Run returns nil) or crashes too often (*CrashLoop). An
// error of Prepare comes back as it is.
func (s *Supervisor) Run(ctx context.Context) error {
	limits := s.Limits.withDefaults()
	var crashes []time.Time
	for restarts := 0; ; restarts++ {
		command, err := s.Prepare(ctx)
		if err != nil {
			return fmt.Errorf("prepare the start of %s: %w", s.Worker, err)
		}
		exit, why := s.once(ctx, limits, command, restarts)
		if ctx.Err() != nil {
			return nil
		}
		now := time.Now()
		crashes = append(since(crashes, now.Add(-limits.Window)), now)
		if refused := exit.Code == RefusedCode; refused || len(crashes) > limits.Restarts {
			return &CrashLoop{Worker: s.Worker, Restarts: len(crashes), Window: limits.Window, Why: why, Refused: refused, LastLines: exit.LastLines}
		}
		timer := time.NewTimer(backoff(limits, len(crashes)))
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
	}
}

// once starts the worker and waits for its end.
func (s *Supervisor) once(ctx context.Context, limits Limits, command Command, restarts int) (exit Exit, why string) {
	process, err := s.Launcher.Launch(command)
	if err != nil {
		exit, why = Exit{Code: -1}, "could not be started: "+err.Error()
		s.Observer.Exited(s.Worker, 0, exit, why)
		return exit, why
	}
	pid := process.PID()
	s.Observer.Started(s.Worker, pid, restarts)

	waiting, stopWaiting := context.WithTimeout(ctx, limits.StartTimeout)
	defer stopWaiting()
	registered := make(chan error, 1)
	go func() { registered <- s.Registered(waiting, pid) }()
	living, stopLiving := context.WithCancel(ctx)
	defer stopLiving()
	absent := make(chan error, 1)
	end := func(reason string) (Exit, string) {
		process.Stop(min(startGrace, limits.StopGrace))
		exit := process.Exit()
		s.Observer.Exited(s.Worker, pid, exit, reason)
		return exit, reason
	}
	for {
		select {
		case <-ctx.Done():
			grace := limits.StopGrace
			if registered != nil { // it has nothing to drain yet, and may be deep in an import that hears no signal
				grace = min(grace, startGrace)
			}
			process.Stop(grace)
			return process.Exit(), ""
		case <-process.Done():
			exit = process.Exit()
			why = exit.String()
			s.Observer.Exited(s.Worker, pid, exit, why)
			return exit, why
		case err := <-registered:
			if err != nil && ctx.Err() == nil {
				return end(fmt.Sprintf("had not registered after %v (limits.worker_start_seconds)", limits.StartTimeout))
			}
			registered = nil
			go func() { absent <- s.Absent(living, pid, limits.AbsentFor) }()
		case err := <-absent:
			if err == nil {
				return end(fmt.Sprintf("left the registry and had not ended %v later", limits.AbsentFor))
			}
			absent = nil
		}
	}
}

func since(times []time.Time, from time.Time) []time.Time {
	for len(times) > 0 && times[0].Before(from) {
		times = times[1:]
	}
	return times
}

func backoff(l Limits, crashes int) time.Duration {
	d := l.FirstBackoff
	for range crashes - 1 {
		if d = 2 * d; d >= l.MaxBackoff {
			return l.MaxBackoff
		}
	}
	return d
}
