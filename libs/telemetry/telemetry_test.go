package telemetry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/telemetry"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// bus stores published events. With block set, a publish blocks until its context ends; with refuse
// set, it fails.
type bus struct {
	mu       sync.Mutex
	messages []message
	block    bool
	refuse   bool
}

type message struct {
	subject string
	events  []*eventv1.Event
}

func (b *bus) PublishProto(ctx context.Context, subject string, body proto.Message) error {
	if b.block {
		<-ctx.Done()
		return ctx.Err()
	}
	if _, err := proto.Marshal(body); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.refuse {
		return errors.New("refused")
	}
	b.messages = append(b.messages, message{subject, body.(*eventv1.EventBatch).GetEvents()})
	return nil
}

// ship logs through an event handler over next, then drains, and returns the messages.
func ship(t *testing.T, b *bus, next slog.Handler, log func(*slog.Logger)) (*telemetry.Events, []message) {
	t.Helper()
	e := telemetry.NewEvents(b, func(run string) string { return "e." + run }, "rolloutd", slog.New(slog.DiscardHandler))
	log(slog.New(e.Handler(next)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := e.Run(ctx); err != nil {
		t.Fatal(err)
	}
	return e, b.messages
}

func TestRecordsOfARunBecomeEvents(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	_, got := ship(t, &bus{}, slog.NewTextHandler(&text, nil), func(log *slog.Logger) {
		log.Info("no run, no event", "x", 1)
		log.Debug("below the level", "run", "run-1")
		of := log.With("run", "run-1", "service", "buffer")
		of.WithGroup("time").Warn("slow\xff", "step", 3, "lease", 1500*time.Millisecond, slog.Group("disk", "name", "sda", "full", 0.5))
		of.Info("step", "kind", "step.committed", "step", uint64(7), "loss", 0.25, "samples", 32, "err", errors.New("none"))
		log.Error("another", "run", "run-2")
		log.With(telemetry.AttrEvent, false).Error("log only", "run", "run-2")
	})
	if len(got) != 2 || got[0].subject != "e.run-1" || got[1].subject != "e.run-2" || len(got[0].events) != 2 || len(got[1].events) != 1 {
		t.Fatalf("messages %+v", got)
	}
	slow, step := got[0].events[0], got[0].events[1]
	if slow.GetLevel() != eventv1.Level_LEVEL_WARN || slow.GetService() != "buffer" || slow.GetKind() != "log" || slow.GetEventId() == "" ||
		slow.GetMetrics()["time.lease"] != 1.5 || slow.GetMetrics()["time.disk.full"] != 0.5 || slow.GetAttributes()["time.disk.name"] != "sda" {
		t.Errorf("slow: %v", slow)
	}
	if step.GetKind() != "step.committed" || step.GetStep() != 7 || step.GetMetrics()["loss"] != 0.25 || step.GetMetrics()["samples"] != 32 ||
		step.GetAttributes()["err"] != "none" || step.GetTime() == nil {
		t.Errorf("step: %v", step)
	}
	if other := got[1].events[0]; other.GetService() != "rolloutd" || other.GetLevel() != eventv1.Level_LEVEL_ERROR {
		t.Errorf("other: %v", other)
	}
	if n := strings.Count(text.String(), "\n"); n != 5 {
		t.Errorf("the log has %d lines:\n%s", n, &text)
	}
}

func TestLoggingNeverBlocks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var logged time.Duration
		e, _ := ship(t, &bus{block: true}, slog.DiscardHandler, func(log *slog.Logger) {
			log = slog.New(enabled{log.Handler()})
			for range 5000 {
				log.Info("x", "run", "run-1")
			}
			logged = time.Since(began)
		})
		if logged != 0 {
			t.Errorf("logging took %v", logged)
		}
		if e.Dropped() != 5000 {
			t.Errorf("%d of 5000 are counted as dropped", e.Dropped())
		}
	})
}

// enabled lets every record through to the handler below.
type enabled struct{ slog.Handler }

func (enabled) Enabled(context.Context, slog.Level) bool { return true }

func TestFlushWaitsForTheBusAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &bus{}
		e := telemetry.NewEvents(b, func(run string) string { return run }, "x", slog.New(slog.DiscardHandler))
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := e.Flush(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("while publishing is blocked: %v", err)
		}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- e.Run(ctx) }()
		began := time.Now()
		for n := range 3 {
			e.Emit(&eventv1.Event{RunId: "run-1"})
			if err := e.Flush(ctx); err != nil {
				t.Error(err)
			}
			b.mu.Lock()
			if len(b.messages) != n+1 {
				t.Errorf("after %d events and flushes %d messages are on the bus", n+1, len(b.messages))
			}
			b.mu.Unlock()
		}
		if waited := time.Since(began); waited > 0 {
			t.Errorf("events waited %v for the batch to fill after Flush", waited)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A bus that takes nothing for a while, as when its disk is full, loses no event.
func TestEventsWaitForTheBus(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &bus{refuse: true}
		e := telemetry.NewEvents(b, func(run string) string { return run }, "x", slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- e.Run(ctx) }()
		e.Emit(&eventv1.Event{RunId: "run-1"})
		time.Sleep(time.Minute)
		e.Emit(&eventv1.Event{RunId: "run-1"})
		b.mu.Lock()
		b.refuse = false
		b.mu.Unlock()
		if err := e.Flush(ctx); err != nil {
			t.Error(err)
		}
		b.mu.Lock()
		if len(b.messages) != 2 || e.Dropped() != 0 {
			t.Errorf("%d messages on the bus, %d events dropped", len(b.messages), e.Dropped())
		}
		b.mu.Unlock()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestEventsTravelInBatches(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &bus{}
		e := telemetry.NewEvents(b, func(run string) string { return run }, "x", slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- e.Run(ctx) }()
		for range 3 {
			for range 100 {
				e.Emit(&eventv1.Event{RunId: "run-1"})
			}
			time.Sleep(20 * time.Millisecond)
		}
		time.Sleep(time.Second) // published after the flush interval, although the batch is not full
		b.mu.Lock()
		sizes := []int{}
		for _, m := range b.messages {
			sizes = append(sizes, len(m.events))
		}
		b.mu.Unlock()
		if len(sizes) != 2 || sizes[0] != 256 || sizes[1] != 44 {
			t.Errorf("batches of %v", sizes)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestHandlerFormats(t *testing.T) {
	t.Parallel()
	var buf bytes.Buffer
	h, err := telemetry.NewHandler(&buf, "json", "warn")
	if err != nil {
		t.Fatal(err)
	}
	sc := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}})
	log := slog.New(h).With("a", 1)
	log.Info("quiet")
	log.WarnContext(trace.ContextWithSpanContext(t.Context(), sc), "loud")
	var line map[string]any
	if err := json.Unmarshal(buf.Bytes(), &line); err != nil || line["msg"] != "loud" || line["trace_id"] != sc.TraceID().String() {
		t.Errorf("%s: %v", &buf, err)
	}
	for _, bad := range [][2]string{{"xml", "info"}, {"text", "loud"}} {
		if _, err := telemetry.NewHandler(&buf, bad[0], bad[1]); err == nil {
			t.Errorf("%v passes", bad)
		}
	}
}

func TestSetupIsOffByDefault(t *testing.T) {
	end, err := telemetry.Setup(t.Context(), "test", "v0", []string{"HOME=/"})
	if err != nil {
		t.Fatal(err)
	}
	if err := end(t.Context()); err != nil {
		t.Error(err)
	}
}
