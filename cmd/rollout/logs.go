package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

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
	repeats          live.Repeats
}

func (a *app) logsCommand() *cobra.Command { return parent("logs", "Read what happened", a.logsTail()) }

func (a *app) logsTail() *cobra.Command {
	var flags logFlags
	cmd := &cobra.Command{
		Use:   "tail RUN",
		Short: "Show the events of a run; --follow goes on with new ones",
		Long: `Show the events of a run. With --follow new ones are shown as they come, until the run ends. ` + runArgument + `

` + orFolder + `

Warnings that say the same, numbers and quoted texts aside, are joined: each is shown at most every ten seconds, with how often it
came. With --details, --kind or --format json every event is shown.`,
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
			return a.browse(cmd, func(ctx context.Context, r record.Reader) error {
				return a.tail(ctx, r, args[0], filter, &flags)
			})
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&flags.services, "service", nil, "only these `services`; inference-worker matches each worker of that kind")
	f.StringSliceVar(&flags.kinds, "kind", nil, "only these `kinds`, such as step.committed")
	f.StringVar(&flags.level, "level", "info", "only this `level` and graver: debug, info, warn, error")
	f.StringVar(&flags.since, "since", "", "only from this `time` on: a duration ago (10m) or a time (2006-01-02T15:04:05Z)")
	f.Uint32VarP(&flags.lines, "lines", "n", 0, "only the newest `events` of those that are there; 0: all")
	f.BoolVarP(&flags.follow, "follow", "f", false, "go on with new events until the run ends")
	f.BoolVar(&flags.noFollow, "no-follow", false, "show what is there and leave")
	_ = f.MarkDeprecated("no-follow", "it is the default")
	f.BoolVar(&flags.details, "details", false, "show every attribute and metric, not the message alone")
	_ = cmd.RegisterFlagCompletionFunc("service", cobra.FixedCompletions(eventServices(), cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions(eventKinds, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("level", cobra.FixedCompletions([]string{"debug", "info", "warn", "error"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (f *logFlags) filter(now time.Time) (*storagev1.EventFilter, error) {
	level, ok := eventv1.Level_value["LEVEL_"+strings.ToUpper(f.level)]
	if !ok || level == 0 {
		return nil, usage("invalid argument %q for --level: it is debug, info, warn or error", f.level)
	}
	if err := known("service", f.services, eventServices()); err != nil {
		return nil, err
	}
	if err := known("kind", f.kinds, eventKinds); err != nil {
		return nil, err
	}
	filter := &storagev1.EventFilter{Services: f.services, Kinds: f.kinds, MinLevel: eventv1.Level(level)}
	if f.since == "" {
		return filter, nil
	}
	if ago, err := time.ParseDuration(f.since); err == nil && ago >= 0 {
		filter.Since = timestamppb.New(now.Add(-ago))
		return filter, nil
	}
	for _, layout := range []string{time.RFC3339Nano, time.DateTime, time.DateOnly} {
		if t, err := time.ParseInLocation(layout, f.since, time.Local); err == nil {
			filter.Since = timestamppb.New(t)
			return filter, nil
		}
	}
	return nil, usage("invalid argument %q for --since: it is a duration such as 10m or a time such as 2006-01-02T15:04:05Z", f.since)
}

func (a *app) tail(ctx context.Context, r record.Reader, name string, filter *storagev1.EventFilter, flags *logFlags) error {
	got, err := r.Run(ctx, name)
	if err != nil {
		return err
	}
	run := got.GetRun()
	filter.RunId = run.GetRunId()
	services, running := r.(record.Services)
	follow := flags.follow && !flags.noFollow && running && !live.Over(run)
	if !follow || flags.lines > 0 {
		limit := 100_000
		if flags.lines > 0 {
			limit = min(int(flags.lines), limit)
		}
		events, err := r.Events(ctx, filter, limit, true)
		if err != nil {
			return err
		}
		if len(events) == 0 && !follow {
			since := ""
			if filter.GetSince() != nil {
				since = " since " + a.timeOf(filter.GetSince().AsTime())
			}
			a.note("run %s has no such events%s", run.GetName(), since)
		}
		if n := len(events); n > 0 {
			filter.AfterSequence = events[n-1].GetSequence()
		}
		// They come in the order in which they were stored; those of other processes come later than they happened.
		slices.SortStableFunc(events, func(x, y *eventv1.Event) int { return x.GetTime().AsTime().Compare(y.GetTime().AsTime()) })
		if err := a.events(events, flags, !follow); err != nil || !follow {
			return err
		}
	}
	return errors.Join(a.follow(ctx, services.Client, filter, flags), a.events(nil, flags, true))
}

// follow prints events until the run ends. An interrupt is the ordinary way to leave.
func (a *app) follow(ctx context.Context, c *client.Client, filter *storagev1.EventFilter, flags *logFlags) error {
	inner, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if watchEnd(inner, c, filter.GetRunId()) {
			select {
			case <-time.After(lateEvents): // they travel another way than the run's state
			case <-inner.Done():
			}
			stop()
		}
	}()
	defer func() { stop(); <-ended }()
	stream, err := c.Events.TailEvents(inner, &storagev1.TailEventsRequest{Filter: filter})
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		switch {
		case inner.Err() != nil || errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if err := a.events(response.GetEvents(), flags, false); err != nil {
			return err
		}
	}
}

// lateEvents is how long the events of a run that has ended are waited for.
const lateEvents = time.Second

// watchEnd waits until the run does nothing more by itself: it has ended, or a refused gradient has paused it; false where it can't be watched.
func watchEnd(ctx context.Context, c *client.Client, runID string) bool {
	stream, err := c.Scheduler.WatchRun(ctx, &runv1.WatchRunRequest{RunId: runID})
	if err != nil {
		return false
	}
	for {
		response, err := stream.Recv()
		if err != nil {
			return false
		}
		if live.Over(response.GetStatus().GetRun()) {
			return true
		}
	}
}

// events prints events; last says that no more follow. Then all stand in the order of time, a joined warning where the newest that it
// counts was.
func (a *app) events(events []*eventv1.Event, flags *logFlags, last bool) error {
	if a.format == formatJSON {
		for _, e := range events {
			if err := output.Line(a.stdout, "", e); err != nil {
				return err
			}
		}
		return nil
	}
	var lines []logLine
	for _, e := range events {
		joined := flags.joins() && e.GetLevel() >= eventv1.Level_LEVEL_WARN
		if joined {
			flags.repeats.Add(e)
		}
		lines = append(lines, a.warnings(flags.repeats.Due(e.GetTime().AsTime()))...)
		if !joined {
			lines = append(lines, logLine{e.GetTime().AsTime(), a.eventText(e, flags.details)})
		}
	}
	if last {
		lines = append(lines, a.warnings(flags.repeats.Rest())...)
		slices.SortStableFunc(lines, func(x, y logLine) int { return x.time.Compare(y.time) })
	}
	for _, line := range lines {
		if _, err := fmt.Fprintln(a.stdout, line.text); err != nil {
			return err
		}
	}
	return nil
}

// logLine is what is printed of one event, or of several warnings that say the same.
type logLine struct {
	time time.Time
	text string
}

// joins reports whether warnings that say the same are joined: not for those who ask for details or for a kind of event.
func (f *logFlags) joins() bool { return !f.details && len(f.kinds) == 0 }

func (a *app) warnings(list []*live.Warning, counts []uint64) (lines []logLine) {
	for i, w := range list {
		text := a.eventText(w.Event, false)
		if counts[i] > 1 {
			text += a.style().Bold(fmt.Sprintf(" (%s times)", output.Count(counts[i])))
		}
		lines = append(lines, logLine{w.GetTime().AsTime(), text})
	}
	return lines
}

// eventText is an event in a line: its message, or everything that it says where it has none or details are wanted.
func (a *app) eventText(e *eventv1.Event, details bool) string {
	s := a.style()
	level := map[eventv1.Level]string{
		eventv1.Level_LEVEL_DEBUG: s.Dim("DEBUG"), eventv1.Level_LEVEL_WARN: s.Yellow("WARN "), eventv1.Level_LEVEL_ERROR: s.Red("ERROR"),
	}[e.GetLevel()]
	if level == "" {
		level = "INFO "
	}
	parts := []string{s.Dim(a.timeOf(e.GetTime().AsTime())), level, s.Cyan(e.GetService())}
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
		if key != "samples" && key != "completions" { // they fill pages: `rollout report` and `rollout completions` show them
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
