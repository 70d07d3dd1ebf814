// Package launch starts worker processes and keeps them running.
//
// Launcher is the port: package local starts child processes; cluster placement is a further adapter. Supervisor restarts what a
// Launcher started, until it is told to stop or the worker crashes too often.
package launch

import (
	"fmt"
	"time"
)

// Command says what to start.
type Command struct {
	Args []string // program and arguments
	Env  []string // whole environment, KEY=value
	Dir  string   // working folder; "" is this process's
	Log  string   // file that its output is appended to
}

// Launcher starts processes.
type Launcher interface {
	// Launch returns when the process was started; that says nothing of its health. The process holds a pipe on its standard
	// input that ends when this process does, however it dies.
	Launch(c Command) (Process, error)
}

// Process is a started process.
type Process interface {
	// PID is its id on its host.
	PID() int
	// Done is closed when it is gone and Exit may be called.
	Done() <-chan struct{}
	// Exit says how it ended.
	Exit() Exit
	// Stop asks it to drain, ends it hard after grace, and returns when it is gone. Idempotent.
	Stop(grace time.Duration)
}

// FencedCode is the exit code of a worker whose weights could not be verified or that a newer incarnation replaced.
const FencedCode = 3

// RefusedCode is the exit code of a worker to which what it was given can't work, such as weights that lack a tensor (EX_CONFIG).
const RefusedCode = 78

// Exit is how a process ended.
type Exit struct {
	Code      int      // exit code; -1 after a signal
	Signal    string   // name of the signal that ended it
	LastLines []string // of its output, at most LastLines of them
}

// LastLines is how many lines of output an Exit keeps.
const LastLines = 20

func (e Exit) String() string {
	switch {
	case e.Signal != "":
		return "was ended by signal " + e.Signal
	case e.Code == FencedCode:
		return fmt.Sprintf("left as fenced (exit code %d)", e.Code)
	case e.Code == RefusedCode:
		return fmt.Sprintf("can't work with what it was given (exit code %d)", e.Code)
	}
	return fmt.Sprintf("left with exit code %d", e.Code)
}
