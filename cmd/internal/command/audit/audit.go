// Package audit has the command `rollout audit`.
package audit

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/audit"
	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// auditShown is how many breaks are printed for people.
const auditShown = 50

// Command returns `rollout audit`.
func Command(env *cli.Env) *cobra.Command {
	var configured string
	var files bool
	cmd := &cobra.Command{
		Use:   "audit RUN",
		Short: "Prove from the ledger that a run lost nothing and did nothing twice",
		Long: `Prove from the ledger that each prompt of each epoch was consumed exactly once or excluded for a reason, that steps, batches
and weights form one unbroken chain, that every trained token was sampled by the weights that are recorded, and that the payload
files and those of the run's snapshots are whole. What breaks the proof is printed with run, group, step and offset, and the exit code is 65.

The files of snapshots are read to their end: where they are large or far away --files=false only looks whether they are there.

Where a control plane runs it is asked; else its state folder is read, and nothing is started. With --config the databases and the
bucket that a rolloutd.toml names are read, and no service is asked. ` + cli.RunHelp,
		Example: `  rollout audit addition-grpo
  rollout audit addition-grpo --format json
  rollout audit addition-grpo --state-dir /copy/of/a/state/folder
  rollout audit addition-grpo --config rolloutd.toml`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return Gather(env, cmd, args[0], configured, files,
				func(e *audit.Evidence, _ audit.Place) error { return show(env, e) },
				func(e *audit.Evidence, _ *client.Client) error { return show(env, e) })
		},
	}
	ConfigFlag(cmd, &configured)
	cmd.Flags().BoolVar(&files, "files", true, "read the files of the run's snapshots, and hold them against their digests")
	return cmd
}

func ConfigFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "config", "", "rolloutd.toml `file` whose databases and bucket are read, while services run or not")
}

// show prints what the rows prove.
func show(env *cli.Env, evidence *audit.Evidence) (err error) {
	report := audit.Check(evidence)
	if env.JSON() {
		err = output.Value(env.Stdout, report)
	} else {
		_, err = fmt.Fprint(env.Stdout, reportText(env.Style(), report))
	}
	if err == nil && !report.Whole {
		err = exit.Silent(exit.Data)
	}
	return err
}

// Gather asks the control plane that was named or that runs here, else reads the state folder; with configured it reads what that
// rolloutd.toml names. With files the files of snapshots are read.
func Gather(env *cli.Env, cmd *cobra.Command, run, configured string, files bool, read func(*audit.Evidence, audit.Place) error, asked func(*audit.Evidence, *client.Client) error) error {
	from := func(ctx context.Context, place audit.Place, as func(*runv1.Run)) error {
		e, err := audit.Read(ctx, place, run, files)
		if err != nil {
			return err
		}
		as(e.Run)
		return read(e, place)
	}
	if configured != "" {
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		scratch, err := os.MkdirTemp("", "rollout-read-")
		if err != nil {
			return exit.New(exit.CannotMake, "", "make a scratch folder: %w", err)
		}
		defer func() { _ = os.RemoveAll(scratch) }()
		place, err := audit.Configured(ctx, configured, scratch, env.Environ)
		if err != nil {
			return err
		}
		return from(ctx, place, func(*runv1.Run) {}) // its services may run elsewhere
	}
	return env.Plane.AskOrRead(cmd,
		func(ctx context.Context, c *client.Client) error {
			e, err := audit.Ask(ctx, c, run, files)
			if err != nil {
				return err
			}
			return asked(e, c)
		},
		func(ctx context.Context, state string) error { return from(ctx, audit.Folder(state), live.AsLeft) })
}

func reportText(s output.Style, r *audit.Report) string {
	var table output.Table
	add := func(name, format string, args ...any) {
		table.Row(fmt.Sprintf("%-8s", name), fmt.Sprintf(format, args...))
	}
	add("run", "%s %s, %s", r.Name, r.RunID, r.State)
	for _, same := range alike(r.Epochs) {
		e, name, each := same[0], fmt.Sprintf("epoch %d", same[0].Epoch), ""
		if len(same) > 1 {
			name, each = fmt.Sprintf("epochs %d to %d", e.Epoch, same[len(same)-1].Epoch), "each "
		}
		add(name, "%s%s consumed once, %s excluded, %s in flight, %s not reached",
			each, output.Count(e.Consumed), output.Count(e.Excluded), output.Count(e.InFlight), output.Count(e.NotIssued))
	}
	for _, reason := range slices.Sorted(maps.Keys(r.Excluded)) {
		add("excluded", "%s for %s", output.Count(r.Excluded[reason]), reason)
	}
	add("samples", "%s trained: %s verified (%s, %s with the digest of their weights), %s dropped because a snapshot covers them",
		output.Count(r.Samples.Trained), output.Plural(r.Samples.Verified, "payload"), output.Plural(r.Samples.Tokens, "token"), output.Count(r.Samples.Receipts), output.Count(r.Samples.Covered))
	add("dropped", "%s, %s refused, %s failed for infrastructure",
		output.Plural(r.Counts["twins_dropped"], "twin"), output.Count(r.Counts["refused"]), output.Count(r.Counts["infra_failed"]))
	add("files", "%s whole (%s), %s covered by snapshots", output.Plural(r.Segments.Whole, "segment"), output.Bytes(r.Segments.Bytes), output.Count(r.Segments.Covered))
	if r.Files.Whole > 0 {
		add("state", "%s of snapshots whole (%s)", output.Plural(r.Files.Whole, "file"), output.Bytes(r.Files.Bytes))
	}
	add("chain", "%s, head %s", output.Plural(r.Steps, "step"), r.Chain)
	add("weights", "%s", r.Digest)
	text := table.String()
	if r.Whole {
		return text + s.Green("whole") + ": nothing was lost, nothing was done twice\n"
	}
	var b strings.Builder
	for _, broken := range r.Breaks[:min(len(r.Breaks), auditShown)] {
		fmt.Fprintf(&b, "%s %s: %s\n", s.Red("break"), breakText(broken), broken.Message)
	}
	if more := len(r.Breaks) - auditShown; more > 0 {
		fmt.Fprintf(&b, "and %d more; --format json has all\n", more)
	}
	return text + b.String()
}

// alike parts epochs into runs of those that follow each other and have the same counts.
func alike(epochs []audit.Epoch) (out [][]audit.Epoch) {
	for i, e := range epochs {
		if i > 0 {
			before := epochs[i-1]
			if before.Epoch++; before == e {
				out[len(out)-1] = append(out[len(out)-1], e)
				continue
			}
		}
		out = append(out, []audit.Epoch{e})
	}
	return out
}

// breakText says what broke and where.
func breakText(b audit.Break) string {
	text := b.Kind + " run " + b.Run
	for _, part := range []struct {
		name  string
		value any
		known bool
	}{
		{"step", b.Step, b.Step > 0}, {"group", b.Group, b.Group != ""}, {"attempt", deref(b.Attempt), b.Attempt != nil},
		{"sample", deref(b.Sample), b.Sample != nil}, {"segment", b.Segment, b.Segment > 0}, {"offset", deref(b.Offset), b.Offset != nil},
	} {
		if part.known {
			text += fmt.Sprintf(" %s %v", part.name, part.value)
		}
	}
	return text
}

func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
