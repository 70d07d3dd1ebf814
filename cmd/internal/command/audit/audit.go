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

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/evidence"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/audit"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/replay"
)

// auditShown is the maximum number of breaks in text output.
const auditShown = 50

// Command returns `rollout audit`.
func Command(env *cli.Env) *cobra.Command {
	var configured string
	var files bool
	cmd := &cobra.Command{
		Use:   "audit RUN",
		Short: "Verify that a run lost nothing and did nothing twice",
		Long: `Verify from the ledger that each prompt of each epoch was consumed once or excluded for a reason, that steps, batches and weights
form one chain, that every trained token was sampled by the recorded weights, and that the files of payloads, snapshots, and published
weights are unchanged. Inconsistencies are printed with run, group, step and offset, and the exit code is 65.

The files of snapshots and weights are read completely; --files=false only checks that they exist. Published weights are checked if the
run's folder is on this host.

RUN can also be the id of a ledger that another program opened and filled (PutTrajectories) without a run of the scheduler. Checks that
need such a run are then skipped, and the output lists them.

If a control plane runs, the command asks it. If not, it reads the state folder. With --config it reads the databases and the bucket
of a rolloutd.toml, without calling services. ` + cli.RunHelp,
		Example: `  rollout audit addition-grpo
  rollout audit addition-grpo --format json
  rollout audit addition-grpo --state-dir /copy/of/a/state/folder
  rollout audit addition-grpo --config rolloutd.toml`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return Gather(env, cmd, args[0], configured, files, func(e *audit.Evidence, _ replay.Files) error { return show(env, e) })
		},
	}
	ConfigFlag(cmd, &configured)
	cmd.Flags().BoolVar(&files, "files", true, "verify the contents of the files of snapshots and weights")
	return cmd
}

func ConfigFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "config", "", "rolloutd.toml `file` whose databases and bucket are read directly")
}

// show prints the report of an audit.
func show(env *cli.Env, evidence *audit.Evidence) (err error) {
	report, err := audit.Check(evidence)
	if err != nil {
		return err
	}
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

// Gather calls use with the evidence of a run, and the files outside of segments. It asks the
// control plane that is named or that runs here, else it reads the state folder. With configured it
// reads what that rolloutd.toml names. readFiles makes it read the files of snapshots.
func Gather(env *cli.Env, cmd *cobra.Command, run, configured string, readFiles bool, use func(*audit.Evidence, replay.Files) error) error {
	if configured != "" {
		return gatherConfigured(env, cmd, run, configured, readFiles, use)
	}
	ask := func(ctx context.Context, c *client.Client) error {
		services := audit.Services{Scheduler: c.Scheduler, Snapshots: c.Snapshot, Artifacts: c.Artifacts, Buffer: c.Buffer}
		e, err := audit.Gather(ctx, services, run, readFiles)
		if err != nil {
			return err
		}
		defer e.Close() // removes temporary files that have no name
		return use(e, replay.Services{Snapshots: c.Snapshot, Artifacts: c.Artifacts})
	}
	return env.Plane.AskOrRead(cmd, ask, func(ctx context.Context, state string) error {
		return gatherPlace(ctx, evidence.Folder(state), run, readFiles, func(e *audit.Evidence, files replay.Files) error {
			if !e.Unscheduled {
				live.MarkInterrupted(e.Run) // no control plane runs
			}
			return use(e, files)
		})
	})
}

func gatherConfigured(env *cli.Env, cmd *cobra.Command, run, file string, readFiles bool, use func(*audit.Evidence, replay.Files) error) error {
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	scratch, err := os.MkdirTemp("", "rollout-read-")
	if err != nil {
		return exit.New(exit.CannotMake, "", "make a temporary folder: %w", err)
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	place, err := evidence.Configured(ctx, file, scratch, env.Environ)
	if err != nil {
		return err
	}
	return gatherPlace(ctx, place, run, readFiles, use)
}

func gatherPlace(ctx context.Context, place evidence.Place, run string, readFiles bool, use func(*audit.Evidence, replay.Files) error) error {
	e, err := evidence.Read(ctx, place, run, readFiles)
	if err != nil {
		return err
	}
	defer e.Close() // removes temporary files that have no name
	artifacts, err := place.Artifacts()
	if err != nil {
		return err
	}
	return use(e, replay.Artifacts{CAS: artifacts})
}

func reportText(s output.Style, r *audit.Report) string {
	var table output.Table
	add := func(name, format string, args ...any) {
		table.Row(fmt.Sprintf("%-8s", name), fmt.Sprintf(format, args...))
	}
	external := len(r.Skipped) > 0
	if external {
		add("run", "%s, a ledger without a run of the scheduler: another program opened it and sent its samples", r.RunID)
	} else {
		add("run", "%s %s, %s", r.Name, r.RunID, r.State)
	}
	for _, same := range alike(r.Epochs) {
		e, name, each := same[0], fmt.Sprintf("epoch %d", same[0].Epoch), ""
		if len(same) > 1 {
			name, each = fmt.Sprintf("epochs %d to %d", e.Epoch, same[len(same)-1].Epoch), "each "
		}
		text := fmt.Sprintf("%s%s consumed once, %s excluded, %s in flight", each, output.Count(e.Consumed), output.Count(e.Excluded), output.Count(e.InFlight))
		if !external { // what another program will still send is unknown
			text += fmt.Sprintf(", %s not reached", output.Count(e.NotIssued))
		}
		add(name, "%s", text)
	}
	for _, reason := range slices.Sorted(maps.Keys(r.Excluded)) {
		add("excluded", "%s for %s", output.Count(r.Excluded[reason]), reason)
	}
	add("samples", "%s trained: %s verified (%s, %s with the digest of their weights), %s deleted because a snapshot covers them",
		output.Count(r.Samples.Trained), output.Plural(r.Samples.Verified, "payload"), output.Plural(r.Samples.Tokens, "token"), output.Count(r.Samples.Receipts), output.Count(r.Samples.Covered))
	add("dropped", "%s, %s refused, %s failed for infrastructure",
		output.Plural(r.Counts["duplicates_dropped"], "duplicate"), output.Count(r.Counts["refused"]), output.Count(r.Counts["infra_failed"]))
	add("files", "%s whole (%s), %s covered by snapshots", output.Plural(r.Segments.Whole, "segment"), output.Bytes(r.Segments.Bytes), output.Count(r.Segments.Covered))
	if r.Files.Whole > 0 {
		add("state", "%s of snapshots whole (%s)", output.Plural(r.Files.Whole, "file"), output.Bytes(r.Files.Bytes))
	}
	if r.Published.Whole > 0 {
		add("folder", "%s of published weights whole (%s)", output.Plural(r.Published.Whole, "file"), output.Bytes(r.Published.Bytes))
	}
	add("chain", "%s, head %s", output.Plural(r.Steps, "step"), r.Chain)
	add("weights", "%s", r.Digest)
	for _, l := range r.Lineages {
		add("lineage", "%d begins with version %d, which was lost and retrained with other bits after step %d; samples of the lost weights: %s", l.Lineage, l.First, l.Step, l.OldLineage)
	}
	for _, skipped := range r.Skipped {
		add("skipped", "%s: %s", skipped.Check, skipped.Reason)
	}
	text := table.String()
	switch {
	case r.Whole && external:
		return text + s.Green("whole") + ": the samples in the ledger are intact, and no step trained one twice\n"
	case r.Whole:
		return text + s.Green("whole") + ": nothing was lost and nothing was done twice\n"
	}
	var b strings.Builder
	for _, broken := range r.Breaks[:min(len(r.Breaks), auditShown)] {
		fmt.Fprintf(&b, "%s %s: %s\n", s.Red("break"), breakText(broken), broken.Message)
	}
	if more := uint64(len(r.Breaks)) + r.Omitted; more > auditShown {
		fmt.Fprintf(&b, "and %d more; list them with --format json\n", more-auditShown)
	}
	return text + b.String()
}

// alike groups consecutive epochs with equal counts.
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

// breakText returns the kind and the place of a break.
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
