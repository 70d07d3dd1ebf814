package launch

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// Limits bound the restarts of a worker and the time that each stage may take.
type Limits struct {
	Restarts int           // restarts allowed within Window; one more is a crash loop
	Window   time.Duration // 0: 10 minutes
	// StartTimeout: a process that has not registered after this time is stopped and counts as
	// crashed. 0: 5 minutes
	StartTimeout time.Duration
	// AbsentFor: a process that registered and has been missing from the registry for this long is
	// stopped and counts as crashed. 0: 30 s
	AbsentFor    time.Duration
	StopGrace    time.Duration // between asking a process to exit and killing it. 0: 2 s
	FirstBackoff time.Duration // before the first restart; doubles up to MaxBackoff and resets after a Window without crashes. 0: 100 ms
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

// startGrace is the grace period of a process that has not registered.
const startGrace = time.Second

// Observer is notified of what happens to a worker, from the goroutine of its supervisor.
type Observer interface {
	// Queued reports what a process waits for before it starts.
	Queued(worker string, p Process, what Awaited)
	Started(worker string, p Process, restarts int)
	// Exited reports an exit that was not requested; why is one line. p is nil if the process could
	// not be started.
	Exited(worker string, p Process, exit Exit, why string)
}

// Supervisor keeps the process of one worker running.
//
//	starting --registered--> serving --exit, AbsentFor--> backoff --> starting
//	    |                                                    ^  |
//	    +--exit, StartTimeout--------------------------------+  +--too many restarts--> CrashLoop
//
// A Queued process is starting from when it began. An exit with Exit.Left is not a crash: the
// worker starts again, however often that happens.
type Supervisor struct {
	Worker   string
	Launcher Launcher
	Limits   Limits
	Observer Observer
	// Prepare makes the command before each start, so that it names the newest weights.
	Prepare func(ctx context.Context) (Command, error)
	// Registered blocks until the process with this id has registered, or ctx ends.
	Registered func(ctx context.Context, id string) error
	// Absent blocks until the process with this id has been missing from the registry for this long,
	// or ctx ends.
	Absent func(ctx context.Context, id string, timeout time.Duration) error
	// Adopted is a process of this worker that an earlier supervisor has started, and Restarts is how
	// often that one had restarted the worker. nil: Run starts the first process.
	Adopted  Process
	Restarts int
}

// CrashLoop is the error of a worker that was restarted too often, or that reported that a restart
// would end the same way.
type CrashLoop struct {
	Worker    string
	Restarts  int
	Window    time.Duration
	Why       string
	Refused   bool // the exit code was RefusedCode
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

// Run keeps the worker running. It returns nil after ctx ended and the process was stopped, or left
// running if the cause is ErrRelease or ErrHandOver; *CrashLoop when the worker crashes too often;
// and the wrapped error if Prepare fails.
func (s *Supervisor) Run(ctx context.Context) error {
	limits := s.Limits.withDefaults()
	var crashes []time.Time
	for restarts, adopted := s.Restarts, s.Adopted; ; restarts, adopted = restarts+1, nil {
		exit, why, err := s.once(ctx, limits, adopted, restarts)
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
		now := time.Now()
		crashes = since(crashes, now.Add(-limits.Window))
		if exit.Left == "" {
			crashes = append(crashes, now)
		}
		if refused := exit.Code == RefusedCode && exit.Left == ""; refused || len(crashes) > limits.Restarts {
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

// once starts the process, unless there is an adopted one, and waits until it has exited.
func (s *Supervisor) once(ctx context.Context, limits Limits, adopted Process, restarts int) (exit Exit, why string, err error) {
	process := adopted
	if process == nil {
		command, err := s.Prepare(ctx)
		if err != nil {
			return Exit{}, "", fmt.Errorf("prepare the start of %s: %w", s.Worker, err)
		}
		if process, err = s.Launcher.Launch(command); err != nil {
			exit, why = Exit{Code: -1}, "could not be started: "+err.Error()
			s.Observer.Exited(s.Worker, nil, exit, why)
			return exit, why, nil
		}
	}
	waited, began := s.queue(ctx, process)
	if !began {
		exit, why = s.unqueue(ctx, limits, process)
		return exit, why, nil
	}
	if adopted == nil || waited {
		s.Observer.Started(s.Worker, process, restarts)
	}
	exit, why = s.attend(ctx, limits, process)
	return exit, why, nil
}

// queue waits until the process has started. waited: it had not before. began is false if it ended
// first, or ctx did.
func (s *Supervisor) queue(ctx context.Context, process Process) (waited, began bool) {
	queued, ok := process.(Queued)
	if !ok {
		return false, true
	}
	for ; ; waited = true {
		select { // before the others, which may be ready too
		case <-queued.Began():
			return waited, true
		default:
		}
		select {
		case <-queued.Began():
			return true, true
		case what := <-queued.Awaits():
			s.Observer.Queued(s.Worker, process, what)
		case <-process.Done():
			select {
			case <-queued.Began(): // both at once
				return true, true
			default:
				return true, false
			}
		case <-ctx.Done():
			return true, false
		}
	}
}

// unqueue ends a process that has not started: it ended, or ctx did.
func (s *Supervisor) unqueue(ctx context.Context, limits Limits, process Process) (exit Exit, why string) {
	select {
	case <-process.Done():
		if exit = process.Exit(); ctx.Err() == nil {
			why = exit.String()
			s.Observer.Exited(s.Worker, process, exit, why)
		}
		return exit, why
	default:
	}
	if !Leave(process, context.Cause(ctx)) {
		process.Stop(min(startGrace, limits.StopGrace))
	}
	return Exit{}, ""
}

// attend waits until the process has exited, and stops it if it does not register or leaves the
// registry.
func (s *Supervisor) attend(ctx context.Context, limits Limits, process Process) (exit Exit, why string) {
	waiting, stopWaiting := context.WithTimeout(ctx, limits.StartTimeout)
	defer stopWaiting()
	registered := make(chan error, 1)
	go func() { registered <- s.Registered(waiting, process.ID()) }()
	living, stopLiving := context.WithCancel(ctx)
	defer stopLiving()
	absent := make(chan error, 1)
	end := func(reason string) (Exit, string) {
		process.Stop(min(startGrace, limits.StopGrace))
		exit := process.Exit()
		s.Observer.Exited(s.Worker, process, exit, reason)
		return exit, reason
	}
	for {
		select {
		case <-ctx.Done():
			if Leave(process, context.Cause(ctx)) {
				return Exit{}, ""
			}
			grace := limits.StopGrace
			if registered != nil { // it has nothing to drain yet, and an import may block its signal handler
				grace = min(grace, startGrace)
			}
			process.Stop(grace)
			return process.Exit(), ""
		case <-process.Done():
			exit = process.Exit()
			why = exit.String()
			s.Observer.Exited(s.Worker, process, exit, why)
			return exit, why
		case err := <-registered:
			if err != nil && ctx.Err() == nil {
				return end(fmt.Sprintf("had not registered after %v (limits.worker_start_seconds)", limits.StartTimeout))
			}
			registered = nil
			go func() { absent <- s.Absent(living, process.ID(), limits.AbsentFor) }()
		case err := <-absent:
			if err == nil {
				return end(fmt.Sprintf("left the registry and was still running %v later", limits.AbsentFor))
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
