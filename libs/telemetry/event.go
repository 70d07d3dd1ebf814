package telemetry

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/id"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

const (
	eventQueue    = 4096                   // maximum number of queued records; more are dropped and counted
	eventBatch    = 256                    // events a message
	eventInterval = 100 * time.Millisecond // how long an event waits for the batch to fill
	publishWait   = 5 * time.Second        // how long one publish may take before it is repeated
	publishPause  = 500 * time.Millisecond // before it is repeated
)

// Publisher sends an EventBatch to a subject and returns when it is stored; *bus.Bus is one.
type Publisher interface {
	PublishProto(ctx context.Context, subject string, body proto.Message) error
}

// Events ships events in batches, from Run. Emit never blocks. While the bus does not take events,
// as when its disk is full, they wait in the queue.
type Events struct {
	publisher Publisher
	subject   func(run string) string
	service   string
	queue     chan queued
	dropped   atomic.Uint64
	log       *slog.Logger
}

// queued is an event, or a mark in the queue that a caller of Flush waits for.
type queued struct {
	event   *eventv1.Event
	reached chan<- struct{} // closed when all earlier events were published
}

// NewEvents makes the shipper of a process. subject names the bus subject of a run ("" for none).
// log is a logger that makes no events; it records drops.
func NewEvents(p Publisher, subject func(run string) string, service string, log *slog.Logger) *Events {
	return &Events{publisher: p, subject: subject, service: service, queue: make(chan queued, eventQueue), log: log}
}

// Emit queues an event, and sets missing fields of id, time, service, level, and kind. If the queue
// is full, the event is dropped and counted.
func (e *Events) Emit(ev *eventv1.Event) {
	if ev.GetTime() == nil {
		ev.Time = timestamppb.Now()
	}
	if ev.GetEventId() == "" {
		ev.EventId = id.New(ev.GetTime().AsTime())
	}
	if ev.GetService() == "" {
		ev.Service = e.service
	}
	if ev.GetKind() == "" {
		ev.Kind = "log"
	}
	if ev.GetLevel() == eventv1.Level_LEVEL_UNSPECIFIED {
		ev.Level = eventv1.Level_LEVEL_INFO
	}
	select {
	case e.queue <- queued{event: ev}:
	default:
		e.dropped.Add(1)
	}
}

// Flush returns when every event that was emitted before is on the bus or was dropped. It does not
// wait for the batch to fill.
func (e *Events) Flush(ctx context.Context) error {
	reached := make(chan struct{})
	select {
	case e.queue <- queued{reached: reached}:
	case <-ctx.Done():
		return fmt.Errorf("events wait for the bus: %w", ctx.Err())
	}
	select {
	case <-reached:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("events wait for the bus: %w", ctx.Err())
	}
}

// Dropped is how many events were lost so far: the queue was full or the bus did not take them.
func (e *Events) Dropped() uint64 { return e.dropped.Load() }

// Run publishes queued events until ctx ends, then publishes the remaining ones and returns.
func (e *Events) Run(ctx context.Context) error {
	reported := uint64(0)
	for {
		select {
		case first := <-e.queue:
			e.shipFrom(ctx, first)
		case <-ctx.Done():
			for len(e.queue) > 0 {
				e.shipFrom(ctx, <-e.queue)
			}
			return nil
		}
		if n := e.dropped.Load(); n > reported {
			e.log.Warn("events were dropped", "events", n-reported, "in_all", n)
			reported = n
		}
	}
}

// shipFrom publishes a batch that starts with first.
func (e *Events) shipFrom(ctx context.Context, first queued) {
	window, cancel := context.WithTimeout(ctx, eventInterval)
	batch, reached := e.collect(window, first)
	cancel()
	e.ship(ctx, batch)
	if reached != nil {
		close(reached)
	}
}

// collect takes events until the batch is full, a mark is reached, or window has ended and the
// queue is empty.
func (e *Events) collect(window context.Context, next queued) (batch []*eventv1.Event, reached chan<- struct{}) {
	for {
		if next.reached != nil {
			return batch, next.reached
		}
		if batch = append(batch, next.event); len(batch) == eventBatch {
			return batch, nil
		}
		select {
		case next = <-e.queue:
			continue
		default:
		}
		select {
		case next = <-e.queue:
		case <-window.Done():
			return batch, nil
		}
	}
}

// ship publishes a batch, one message a run, in the order of the events. It repeats a message until
// the bus takes it, because storage drops duplicates; after ctx has ended it tries once more.
func (e *Events) ship(ctx context.Context, batch []*eventv1.Event) {
	byRun := map[string]*eventv1.EventBatch{}
	var runs []string
	for _, ev := range batch {
		run := ev.GetRunId()
		if byRun[run] == nil {
			byRun[run] = &eventv1.EventBatch{}
			runs = append(runs, run)
		}
		byRun[run].Events = append(byRun[run].Events, ev)
	}
	for _, run := range runs {
		for {
			last := ctx.Err() != nil
			err := e.publish(ctx, e.subject(run), byRun[run])
			if err == nil {
				break
			}
			e.log.Debug("events could not be published", "run", run, "error", err)
			if last {
				e.dropped.Add(uint64(len(byRun[run].GetEvents())))
				break
			}
			pause(ctx, publishPause)
		}
	}
}

// publish publishes a message, also if ctx ends while it does.
func (e *Events) publish(ctx context.Context, subject string, batch *eventv1.EventBatch) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), publishWait)
	defer cancel()
	return e.publisher.PublishProto(ctx, subject, batch)
}

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
