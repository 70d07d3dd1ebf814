// Command rollout trains language models with reinforcement learning: it is the thin client of the control plane, which it
// starts itself where none is named.
package main

import (
	"context"
	"os"

	"golang.org/x/term"
)

// version is set by the linker.
var version = "unknown"

func main() {
	a := &app{
		stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, env: os.Getenv, environ: os.Environ(),
		terminal: term.IsTerminal(int(os.Stdout.Fd())),
	}
	a.typed = a.terminal && term.IsTerminal(int(os.Stdin.Fd()))
	a.dial = a.connect
	os.Exit(a.execute(context.Background(), os.Args[1:]))
}
