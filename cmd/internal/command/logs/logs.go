// Package logs has the commands `rollout logs tail`, `rollout logs telemetry`, and `rollout logs
// worker`.
package logs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

type logFlags struct {
	services, kinds  []string
	level, since     string
	lines            uint32
	follow, noFollow bool
	details          bool
}

// Command returns `rollout logs`.
func Command(env *cli.Env) *cobra.Command {
	return cli.Group("logs", "Show events, telemetry, and the output of workers", tailCommand(env), telemetryCommand(env), workerCommand(env))
}

func tailCommand(env *cli.Env) *cobra.Command {
	var flags logFlags
	cmd := &cobra.Command{
		Use:   "tail RUN",
		Short: "Show the events of a run",
		Long: `Show the events of a run. With --follow, wait for new events until the run ends. ` + cli.RunHelp + `

` + cli.FolderHelp + `

Warnings that differ only in numbers and quoted text are joined: each is shown at most every ten seconds, with a count. With
--details, --kind or --format json every event is shown.`,
		Example: `  rollout logs tail addition-grpo
  rollout logs tail addition-grpo --follow --service inference-worker --level warn
  rollout logs tail addition-grpo --since 10m
  rollout logs tail addition-grpo --kind step.committed --format json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			filter, err := flags.filter(time.Now())
			if err != nil {
				return err
			}
			return env.Plane.Browse(cmd, func(ctx context.Context, r record.Reader) error {
				return (&tail{env: env, flags: &flags, filter: filter}).run(ctx, r, args[0])
			})
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&flags.services, "service", nil, "only events of these `services`; inference-worker matches all workers of that kind")
	f.StringSliceVar(&flags.kinds, "kind", nil, "only events of these `kinds`, for example step.committed")
	f.StringVar(&flags.level, "level", "info", "minimum `level`: debug, info, warn or error")
	f.StringVar(&flags.since, "since", "", "only events since this `time`: a duration ago (10m) or a time (2006-01-02T15:04:05Z)")
	f.Uint32VarP(&flags.lines, "lines", "n", 0, "`number` of stored events, the newest; 0: all")
	f.BoolVarP(&flags.follow, "follow", "f", false, "wait for new events until the run ends")
	f.BoolVar(&flags.noFollow, "no-follow", false, "show stored events and exit")
	_ = f.MarkDeprecated("no-follow", "it is the default")
	f.BoolVar(&flags.details, "details", false, "show all attributes and metrics, not only the message")
	_ = cmd.RegisterFlagCompletionFunc("service", cobra.FixedCompletions(eventServices(), cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions(eventKinds, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("level", cobra.FixedCompletions([]string{"debug", "info", "warn", "error"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (f *logFlags) filter(now time.Time) (*storagev1.EventFilter, error) {
	level, ok := eventv1.Level_value["LEVEL_"+strings.ToUpper(f.level)]
	if !ok || level == 0 {
		return nil, cli.Usage("invalid argument %q for --level: must be debug, info, warn or error", f.level)
	}
	if err := cli.OneOf("service", f.services, eventServices()); err != nil {
		return nil, err
	}
	if err := cli.OneOf("kind", f.kinds, eventKinds); err != nil {
		return nil, err
	}
	filter := &storagev1.EventFilter{Services: f.services, Kinds: f.kinds, MinLevel: eventv1.Level(level)}
	var err error
	filter.Since, err = sinceTime(f.since, now)
	return filter, err
}

// tail prints the events of one run.
type tail struct {
	env     *cli.Env
	flags   *logFlags
	filter  *storagev1.EventFilter
	repeats live.Repeats
}

func (t *tail) run(ctx context.Context, r record.Reader, name string) error {
	got, err := r.Run(ctx, name)
	if err != nil {
		return err
	}
	run := got.GetRun()
	t.filter.RunId = run.GetRunId()
	services, running := r.(record.Services)
	follow := t.flags.follow && !t.flags.noFollow && running && !live.Over(run)
	if !follow || t.flags.lines > 0 {
		if err := t.stored(ctx, r, run, follow); err != nil || !follow {
			return err
		}
	}
	return errors.Join(t.follow(ctx, services.Client), t.print(nil, true))
}

// ordered is how many events are printed at a time, in the order of their time.
const ordered = 2000

// stored prints the events that are stored, in the order of their time: an event of another process
// is stored some time after it happened.
func (t *tail) stored(ctx context.Context, r record.Reader, run *runv1.Run, follow bool) error {
	var window []*eventv1.Event
	add := func(e *eventv1.Event) error {
		t.filter.AfterSequence = e.GetSequence()
		if window = append(window, e); len(window) < 2*ordered {
			return nil
		}
		sortByTime(window)
		some := window[:ordered]
		window = slices.Clone(window[ordered:])
		return t.print(some, false)
	}
	read := func() error { return record.Each(ctx, r, proto.CloneOf(t.filter), add) }
	if t.flags.lines > 0 {
		read = func() error {
			events, err := r.Events(ctx, t.filter, int(t.flags.lines), true)
			for _, e := range events {
				err = errors.Join(err, add(e))
			}
			return err
		}
	}
	if err := read(); err != nil {
		return err
	}
	if len(window) == 0 && !follow { // a full window leaves some
		since := ""
		if t.filter.GetSince() != nil {
			since = " since " + t.env.Time(t.filter.GetSince().AsTime())
		}
		t.env.Note("run %s has no matching events%s", run.GetName(), since)
	}
	sortByTime(window)
	return t.print(window, !follow)
}

func sortByTime(events []*eventv1.Event) {
	slices.SortStableFunc(events, func(x, y *eventv1.Event) int { return x.GetTime().AsTime().Compare(y.GetTime().AsTime()) })
}

// lateEvents is how long follow waits for events after the run has ended.
const lateEvents = time.Second

// follow prints new events until the run is over or the user interrupts.
func (t *tail) follow(ctx context.Context, c *client.Client) error {
	inner, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if live.Watch(inner, c, t.filter.GetRunId(), func(*runv1.RunStatus) error { return nil }) == nil {
			select {
			case <-time.After(lateEvents): // events arrive on another stream than the run's state
			case <-inner.Done():
			}
			stop()
		}
	}()
	defer func() { stop(); <-ended }()
	err := live.Tail(inner, c, t.filter, func(e *eventv1.Event) error { return t.print([]*eventv1.Event{e}, false) })
	if inner.Err() != nil {
		return nil
	}
	return err
}

// logLine is the line of an event, or of several equal warnings.
type logLine struct {
	time time.Time
	text string
}

// print prints events. Equal warnings are joined. With last no more events follow: all lines are
// then sorted by time, a joined warning by the time of its newest event.
func (t *tail) print(events []*eventv1.Event, last bool) error {
	if t.env.JSON() {
		for _, e := range events {
			if err := output.Line(t.env.Stdout, "", e); err != nil {
				return err
			}
		}
		return nil
	}
	var lines []logLine
	for _, e := range events {
		joined := t.flags.joins() && live.Joins(e)
		if joined {
			t.repeats.Add(e)
		}
		lines = append(lines, t.warnings(t.repeats.Due(e.GetTime().AsTime()))...)
		if !joined {
			lines = append(lines, logLine{e.GetTime().AsTime(), eventText(t.env, e, t.flags.details)})
		}
	}
	if last {
		lines = append(lines, t.warnings(t.repeats.Rest())...)
		slices.SortStableFunc(lines, func(x, y logLine) int { return x.time.Compare(y.time) })
	}
	for _, line := range lines {
		if _, err := fmt.Fprintln(t.env.Stdout, line.text); err != nil {
			return err
		}
	}
	return nil
}

// joins reports whether equal warnings are joined: not with --details or --kind.
func (f *logFlags) joins() bool { return !f.details && len(f.kinds) == 0 }

func (t *tail) warnings(list []*live.Warning, counts []uint64) (lines []logLine) {
	for i, w := range list {
		text := eventText(t.env, w.Event, false)
		if counts[i] > 1 {
			text += t.env.Style().Bold(fmt.Sprintf(" (%s times)", output.Count(counts[i])))
		}
		lines = append(lines, logLine{w.GetTime().AsTime(), text})
	}
	return lines
}

// eventText formats an event as a line: its message, and with details, or without a message, all
// attributes and metrics.
func eventText(env *cli.Env, e *eventv1.Event, details bool) string {
	s := env.Style()
	level := map[eventv1.Level]string{
		eventv1.Level_LEVEL_DEBUG: s.Dim("DEBUG"), eventv1.Level_LEVEL_WARN: s.Yellow("WARN "), eventv1.Level_LEVEL_ERROR: s.Red("ERROR"),
	}[e.GetLevel()]
	if level == "" {
		level = "INFO "
	}
	parts := []string{s.Dim(env.Time(e.GetTime().AsTime())), level, s.Cyan(e.GetService())}
	if e.GetKind() != "log" {
		parts = append(parts, s.Bold(e.GetKind()))
	}
	if e.GetStep() > 0 {
		parts = append(parts, fmt.Sprintf("step=%d", e.GetStep()))
	}
	if e.GetMessage() != "" {
		parts = append(parts, strings.ReplaceAll(e.GetMessage(), "\n", "\n    "))
	}
	if e.GetMessage() != "" && !details {
		return strings.Join(parts, " ")
	}
	for _, key := range slices.Sorted(maps.Keys(e.GetAttributes())) {
		if key != "samples" && key != "completions" { // too long; `rollout report` and `rollout completions` show them
			parts = append(parts, s.Dim(key+"="+quoteIfNeeded(e.GetAttributes()[key])))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(e.GetMetrics())) {
		parts = append(parts, s.Dim(key+"="+output.Number(e.GetMetrics()[key])))
	}
	return strings.Join(parts, " ")
}

func quoteIfNeeded(text string) string {
	if text == "" || strings.ContainsAny(text, " \n\t\"") {
		return fmt.Sprintf("%q", text)
	}
	return text
}
