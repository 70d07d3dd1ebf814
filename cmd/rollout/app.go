package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/exit"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/style"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// app is one call of the program.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	env            func(string) string
	environ        []string // all of it, for configurations that name variables
	terminal       bool     // whether stdout is one
	typed          bool     // whether stdin is one too: a person types
	dial           func(ctx context.Context) (*client.Client, error)
	zone           *time.Location                    // of times that people read; nil: local
	now            func() time.Time                  // nil: time.Now
	interrupts     func() (<-chan os.Signal, func()) // replaced by tests

	server, consul, stateDir, tokenFile, apiKey, format string
	certs                                               cert.Files
	private                                             bool // whether --server is called in plain text wherever it is
	looks                                               bool // whether the command only looks: it starts no daemon
}

const (
	formatText = "text"
	formatJSON = "json"
)

// execute runs one command line and returns the exit code.
func (a *app) execute(ctx context.Context, args []string) int {
	root := a.root()
	root.SetArgs(args)
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	command, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	e := exit.From(err)
	if e.Err == nil {
		return e.Code
	}
	var unknown *usageError
	if errors.As(err, &unknown) || isCobraUsage(err) {
		e = &exit.Error{Code: exit.Usage, Err: ownWords(command, e.Err), Fix: fmt.Sprintf("see `%s --help`", command.CommandPath())}
	}
	a.fail(e, err)
	return e.Code
}

// fail prints an error where errors go, in the format that was asked for.
func (a *app) fail(e *exit.Error, full error) {
	var violations []map[string]string
	if domain, ok := rpcerr.From(full); ok {
		for _, v := range domain.Violations() {
			violations = append(violations, map[string]string{"field": v.Path, "description": v.Description})
		}
	}
	if a.format == formatJSON {
		_ = output.Value(a.stderr, map[string]any{"error": map[string]any{
			"exit_code": e.Code, "reason": e.Reason, "message": e.Err.Error(), "fix": e.Fix, "violations": violations,
		}})
		return
	}
	s := a.errStyle()
	fmt.Fprintf(a.stderr, "rollout: %s\n", s.Red(e.Err.Error()))
	for _, v := range violations {
		fmt.Fprintf(a.stderr, "   %s: %s\n", v["field"], v["description"])
	}
	if e.Reason != "" {
		fmt.Fprintf(a.stderr, "   reason: %s\n", e.Reason)
	}
	if e.Fix != "" {
		fmt.Fprintf(a.stderr, "   %s %s\n", s.Cyan("fix:"), e.Fix)
	}
}

// style is that of stdout.
func (a *app) style() style.Style {
	return style.Style{Color: a.terminal && a.env("NO_COLOR") == "" && a.env("TERM") != "dumb"}
}

// errStyle is that of stderr: coloured where stdout is, and stderr is a terminal too.
func (a *app) errStyle() style.Style {
	file, ok := a.stderr.(*os.File)
	if !ok {
		return style.Style{}
	}
	info, err := file.Stat()
	return style.Style{Color: a.style().Color && err == nil && info.Mode()&os.ModeCharDevice != 0}
}

// message answers with one message: as JSON where that was asked for, else as text makes it.
func (a *app) message(m proto.Message, text func() string) error {
	if a.format == formatJSON {
		return output.Document(a.stdout, m)
	}
	_, err := io.WriteString(a.stdout, text())
	return err
}

// note tells people what goes on beside the answer.
func (a *app) note(format string, args ...any) {
	if a.format != formatJSON {
		fmt.Fprintf(a.stderr, format+"\n", args...)
	}
}

// timeOf writes a time for people.
func (a *app) timeOf(t time.Time) string {
	if t.IsZero() || t.Unix() == 0 {
		return "-"
	}
	zone := a.zone
	if zone == nil {
		zone = time.Local
	}
	return t.In(zone).Format("2006-01-02 15:04:05")
}
