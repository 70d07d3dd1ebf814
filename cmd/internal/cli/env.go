// Package cli holds what the commands of rollout share: the environment that they run in, the
// connection to the control plane, flags that several commands have, and command-line errors.
package cli

import (
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// Env is the environment that a command runs in. The flags of the root command are written into it,
// so a command must read it when it runs, not when it is constructed.
type Env struct {
	*Printer
	Stdin       io.Reader
	Interactive bool     // both stdin and stdout are terminals
	Environ     []string // NAME=value
	Version     string   // of this program
	Plane       *Plane
	Now         func() time.Time
	Signals     func() (interrupts <-chan os.Signal, stop func()) // SIGINT and SIGTERM
}

// New returns an environment with the system's clock and signals.
func New(stdin io.Reader, printer *Printer, environ []string) *Env {
	return &Env{
		Printer: printer, Stdin: stdin, Environ: environ, Now: time.Now, Signals: signals,
		Plane: &Plane{printer: printer, environ: environ},
	}
}

// Getenv returns the value of an environment variable, "" where it is not set.
func (e *Env) Getenv(name string) string { return getenv(e.Environ, name) }

func getenv(environ []string, name string) string {
	for _, variable := range environ {
		if value, ok := strings.CutPrefix(variable, name+"="); ok {
			return value
		}
	}
	return ""
}

func signals() (<-chan os.Signal, func()) {
	ch := make(chan os.Signal, 4)
	signal.Notify(ch, os.Interrupt, syscall.SIGTERM)
	return ch, func() { signal.Stop(ch) }
}
