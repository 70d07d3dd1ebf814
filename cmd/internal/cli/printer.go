package cli

import (
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// The values of --format.
const (
	FormatText = "text"
	FormatJSON = "json"
)

// Printer writes answers to stdout, and notes and errors to stderr.
type Printer struct {
	Stdout, Stderr io.Writer
	Terminal       bool // stdout is a terminal
	Color          bool
	Format         string         // FormatText or FormatJSON
	Zone           *time.Location // of times that people read; nil: local
}

// JSON reports whether answers are written as JSON.
func (p *Printer) JSON() bool { return p.Format == FormatJSON }

// Style returns the style of stdout.
func (p *Printer) Style() output.Style { return output.Style{Color: p.Color} }

// ErrStyle returns the style of stderr, which is colored where stdout is and stderr is a terminal.
func (p *Printer) ErrStyle() output.Style {
	file, ok := p.Stderr.(*os.File)
	if !ok {
		return output.Style{}
	}
	info, err := file.Stat()
	return output.Style{Color: p.Color && err == nil && info.Mode()&os.ModeCharDevice != 0}
}

// Message writes m as a JSON document with --format json, else the result of text.
func (p *Printer) Message(m proto.Message, text func() string) error {
	if p.JSON() {
		return output.Document(p.Stdout, m)
	}
	_, err := io.WriteString(p.Stdout, text())
	return err
}

// Note writes a line to stderr, unless the format is JSON.
func (p *Printer) Note(format string, args ...any) {
	if !p.JSON() {
		fmt.Fprintf(p.Stderr, format+"\n", args...)
	}
}

// Time formats a time for people; "-" is the zero time.
func (p *Printer) Time(t time.Time) string {
	if t.IsZero() || t.Unix() == 0 {
		return "-"
	}
	zone := p.Zone
	if zone == nil {
		zone = time.Local
	}
	return t.In(zone).Format("2006-01-02 15:04:05")
}

// Error writes an error to stderr. e is what is printed; full is the error that it was made from,
// whose violations are printed too.
func (p *Printer) Error(e *exit.Error, full error) {
	var violations []map[string]string
	if domain, ok := rpcerr.From(full); ok {
		for _, v := range domain.Violations() {
			violations = append(violations, map[string]string{"field": v.Path, "description": v.Description})
		}
	}
	if p.JSON() {
		_ = output.Value(p.Stderr, map[string]any{"error": map[string]any{
			"exit_code": e.Code, "reason": e.Reason, "message": e.Err.Error(), "fix": e.Fix, "violations": violations,
		}})
		return
	}
	s := p.ErrStyle()
	fmt.Fprintf(p.Stderr, "rollout: %s\n", s.Red(e.Err.Error()))
	for _, v := range violations {
		fmt.Fprintf(p.Stderr, "   %s: %s\n", v["field"], v["description"])
	}
	if e.Reason != "" {
		fmt.Fprintf(p.Stderr, "   reason: %s\n", e.Reason)
	}
	if e.Fix != "" {
		fmt.Fprintf(p.Stderr, "   %s %s\n", s.Cyan("fix:"), e.Fix)
	}
}
