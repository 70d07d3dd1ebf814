// Package launch starts worker processes and keeps them running.
//
// Launcher is the port. Package local implements it with child processes, package keeper with
// processes that another scheduler can adopt, package external with processes that an operator
// starts, and package slurm with jobs of a cluster; ByKind selects one for each kind of worker.
// Package launchtest is the suite that each implementation passes. Supervisor restarts the process
// of one worker until it is stopped or the worker crashes too often.
package launch

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Command describes the process to start.
type Command struct {
	Worker string   // id of the worker, for people
	Kind   string   // of the worker
	Args   []string // program and arguments
	Env    []string // the whole environment, KEY=value
	Dir    string   // working directory; "" is that of this process
	Log    string   // file to which stdout and stderr are appended, as far as the limits of the launcher allow
	Keep   bool     // the process may outlive the process that called Launch, if the launcher is a Keeper
}

// Launcher starts processes.
type Launcher interface {
	// Launch returns once the process has started, which does not mean that it is healthy, or once it
	// waits for its start, if it is Queued. The process gets a pipe as its standard input. The pipe
	// closes when the process that called Launch exits for any reason, and the worker then exits too.
	// A Keeper closes the pipe of a kept process later.
	Launch(c Command) (Process, error)
}

// Keeper is a launcher whose kept processes outlive the one that called Launch by a grace period. A
// process that no one adopts within it is stopped.
type Keeper interface {
	Launcher
	// Adopt makes the caller the owner of a kept process, also of one that has exited since. The
	// earlier owner neither stops it nor observes its exit any more. ErrGone if there is no such
	// process, or a newer leader owns it.
	Adopt(handle string) (Process, error)
}

// Kept is a process that was launched with Command.Keep by a Keeper.
type Kept interface {
	Process
	// Handle names the process for Adopt, on this host.
	Handle() string
	// Release gives up the process without stopping it. If no one adopts it within the grace period
	// (0: that of the launcher), it is stopped.
	Release(grace time.Duration)
}

// Queued is a process that does not start in Launch, because a place for it has to become free.
type Queued interface {
	Process
	// Began is closed when the process has started. Done alone is closed if it ended before that.
	Began() <-chan struct{}
	// Awaits has what the process waits for, at once and when it changes. Only the newest one is kept.
	Awaits() <-chan Awaited
}

// Awaited is what a Queued process waits for.
type Awaited struct {
	Owner  string // of the wait, as in package wait
	Reason string // as in package wait
	What   string // what each worker needs, without an article: "external inference worker"
	Detail string // why it is not there, as far as that is known; may be empty
	Fix    string
}

// ErrGone reports that a process cannot be adopted.
var ErrGone = errors.New("the process cannot be adopted")

// Causes with which the context of a Supervisor ends and the process of its worker stays.
var (
	// ErrRelease: another scheduler leads, or this one continues with the workers.
	ErrRelease = errors.New("another scheduler takes over the workers")
	// ErrHandOver: this scheduler stops, and its replica leads in a moment, if there is one.
	ErrHandOver = errors.New("the scheduler stops and hands over its workers")
)

// handOverGrace is how long a process waits for an owner after ErrHandOver. A lease that was set
// free is taken within 0.2 s.
const handOverGrace = 5 * time.Second

// Leave gives up a process without stopping it, if the cause is ErrRelease or ErrHandOver and the
// process is Kept; otherwise it returns false.
func Leave(p Process, cause error) bool {
	kept, ok := p.(Kept)
	switch {
	case !ok:
		return false
	case errors.Is(cause, ErrRelease):
		kept.Release(0)
		return true
	case errors.Is(cause, ErrHandOver):
		kept.Release(handOverGrace)
		return true
	}
	return false
}

// Process is a started process.
type Process interface {
	// ID identifies the process. It is opaque, never empty, stays the same, and is unique among all
	// processes of a launcher.
	ID() string
	// Done is closed when the process has exited.
	Done() <-chan struct{}
	// Exit waits until the process has exited and reports how.
	Exit() Exit
	// Stop asks the process to exit, kills it after the grace period, and returns when it has exited.
	// Idempotent.
	Stop(grace time.Duration)
}

// PID is the process id on this host, for people and logs; 0 if the launcher has none.
func PID(p Process) int {
	if local, ok := p.(interface{ PID() int }); ok {
		return local.PID()
	}
	return 0
}

// FencedCode is the exit code of a worker that could not verify its weights, or that a newer
// incarnation replaced.
const FencedCode = 3

// StalledCode is the exit code of a worker that stopped itself because its engine or trainer made
// no progress. The last line of its output begins with stalledLine.
const (
	StalledCode = 4
	stalledLine = "stalled: "
)

// RefusedCode is the exit code of a worker whose input cannot work, such as weights that lack a
// tensor (EX_CONFIG). A restart would end the same way.
const RefusedCode = 78

// Exit describes how a process ended.
type Exit struct {
	// Left is why the process ended, if its operator or its cluster ended it, or its host was lost:
	// "was withdrawn by its operator". That is not a crash. Empty otherwise.
	Left string
	// NotStarted is why a Queued process could not be started; empty otherwise.
	NotStarted string
	Code       int      // exit code; -1 after a signal
	Signal     string   // name of the signal that ended the process
	LastLines  []string // the last lines of its output, at most LastLines
}

// LastLines is the number of output lines that an Exit keeps.
const LastLines = 20

func (e Exit) String() string {
	switch {
	case e.Left != "":
		return e.Left
	case e.NotStarted != "":
		return "could not be started: " + e.NotStarted
	case e.Signal != "":
		return "was ended by signal " + e.Signal
	case e.Code == FencedCode:
		return fmt.Sprintf("was fenced (exit code %d)", e.Code)
	case e.Code == StalledCode:
		return fmt.Sprintf("made no progress and stopped itself (exit code %d)%s", e.Code, e.stall())
	case e.Code == RefusedCode:
		return fmt.Sprintf("cannot work with its input (exit code %d)", e.Code)
	}
	return fmt.Sprintf("exited with code %d", e.Code)
}

// stall is the reason that a stalled worker gave, after a colon; "" if it gave none.
func (e Exit) stall() string {
	for _, line := range slices.Backward(e.LastLines) {
		if why, found := strings.CutPrefix(line, stalledLine); found {
			return ": " + why
		}
	}
	return ""
}
