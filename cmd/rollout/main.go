// Command rollout trains language models with reinforcement learning. It is a client of the control
// plane; where no server is named it starts a local one.
package main

import (
	"context"
	"os"

	"golang.org/x/term"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/command"
)

// version is set by the linker.
var version = "unknown"

func main() {
	printer := &cli.Printer{Stdout: os.Stdout, Stderr: os.Stderr, Terminal: term.IsTerminal(int(os.Stdout.Fd()))}
	env := cli.New(os.Stdin, printer, os.Environ())
	env.Version = version
	env.Interactive = env.Terminal && term.IsTerminal(int(os.Stdin.Fd()))
	env.Color = env.Terminal && env.Getenv("NO_COLOR") == "" && env.Getenv("TERM") != "dumb"
	os.Exit(command.Execute(context.Background(), env, os.Args[1:]))
}
