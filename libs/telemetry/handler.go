package telemetry

import (
	"context"
	"log/slog"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// Attributes that set a field of an event.
const (
	AttrRun     = "run"     // string: the run; records without it do not become events
	AttrKind    = "kind"    // string: the kind; "log" if absent
	AttrStep    = "step"    // integer: the optimizer step
	AttrService = "service" // string: the service, in a process that hosts several; the process's name if absent
	AttrEvent   = "event"   // bool: false for a record that has a run but must not become an event
)

// Handler returns an slog.Handler that passes every record to next and also emits an event for each
// record with a "run" attribute, unless AttrEvent is false. Numbers become metrics of the event;
// other attributes keep their dotted names.
func (e *Events) Handler(next slog.Handler) slog.Handler { return &eventHandler{events: e, next: next} }

type eventHandler struct {
	events *Events
	next   slog.Handler
	attrs  []slog.Attr // collected by WithAttrs, names already prefixed
	prefix string
}

func (h *eventHandler) Enabled(ctx context.Context, l slog.Level) bool { return h.next.Enabled(ctx, l) }

func (h *eventHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	c := *h
	c.next = h.next.WithAttrs(attrs)
	c.attrs = append(c.attrs[:len(c.attrs):len(c.attrs)], flatten(nil, h.prefix, attrs)...)
	return &c
}

func (h *eventHandler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	c := *h
	c.next, c.prefix = h.next.WithGroup(name), h.prefix+name+"."
	return &c
}

func (h *eventHandler) Handle(ctx context.Context, r slog.Record) error {
	attrs := h.attrs[:len(h.attrs):len(h.attrs)]
	r.Attrs(func(a slog.Attr) bool {
		attrs = flatten(attrs, h.prefix, []slog.Attr{a})
		return true
	})
	if ev := event(r, attrs); ev.GetRunId() != "" && !slices.ContainsFunc(attrs, slog.Bool(AttrEvent, false).Equal) {
		h.events.Emit(ev)
	}
	return h.next.Handle(ctx, r)
}

// event builds an event from a record.
func event(r slog.Record, attrs []slog.Attr) *eventv1.Event {
	ev := &eventv1.Event{Message: strings.ToValidUTF8(r.Message, "\uFFFD"), Level: level(r.Level), Attributes: map[string]string{}, Metrics: map[string]float64{}}
	if !r.Time.IsZero() {
		ev.Time = timestamppb.New(r.Time)
	}
	for _, a := range attrs {
		switch {
		case a.Key == AttrRun:
			ev.RunId = a.Value.String()
		case a.Key == AttrKind:
			ev.Kind = a.Value.String()
		case a.Key == AttrService:
			ev.Service = a.Value.String()
		case a.Key == AttrStep && a.Value.Kind() == slog.KindUint64:
			ev.Step = a.Value.Uint64()
		case a.Key == AttrStep && a.Value.Kind() == slog.KindInt64:
			ev.Step = uint64(max(0, a.Value.Int64()))
		default:
			put(ev, a)
		}
	}
	return ev
}

func put(ev *eventv1.Event, a slog.Attr) {
	switch a.Value.Kind() {
	case slog.KindFloat64:
		ev.Metrics[a.Key] = a.Value.Float64()
	case slog.KindInt64:
		ev.Metrics[a.Key] = float64(a.Value.Int64())
	case slog.KindUint64:
		ev.Metrics[a.Key] = float64(a.Value.Uint64())
	case slog.KindDuration: // seconds
		ev.Metrics[a.Key] = a.Value.Duration().Seconds()
	default:
		ev.Attributes[a.Key] = strings.ToValidUTF8(a.Value.String(), "\uFFFD") // other text would spoil the whole batch
	}
}

// flatten resolves values and unfolds groups into dotted names.
func flatten(out []slog.Attr, prefix string, attrs []slog.Attr) []slog.Attr {
	for _, a := range attrs {
		v := a.Value.Resolve()
		switch {
		case a.Equal(slog.Attr{}):
		case v.Kind() != slog.KindGroup:
			out = append(out, slog.Attr{Key: prefix + a.Key, Value: v})
		case a.Key == "":
			out = flatten(out, prefix, v.Group())
		default:
			out = flatten(out, prefix+a.Key+".", v.Group())
		}
	}
	return out
}

func level(l slog.Level) eventv1.Level {
	switch {
	case l < slog.LevelInfo:
		return eventv1.Level_LEVEL_DEBUG
	case l < slog.LevelWarn:
		return eventv1.Level_LEVEL_INFO
	case l < slog.LevelError:
		return eventv1.Level_LEVEL_WARN
	}
	return eventv1.Level_LEVEL_ERROR
}
