package storage

import (
	"context"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/proto/gen/names"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// notifier wakes the goroutines that wait for new events.
type notifier struct {
	mu      sync.Mutex
	changed chan struct{}
}

func (n *notifier) wait() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.changed == nil {
		n.changed = make(chan struct{})
	}
	return n.changed
}

func (n *notifier) notify() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.changed != nil {
		close(n.changed)
		n.changed = nil
	}
}

// append stores events and wakes the tails.
func (s *Server) append(ctx context.Context, events []*Event) error {
	added, err := s.deps.Store.Append(ctx, events)
	if added > 0 {
		s.added.notify()
	}
	return err
}

// ingest stores the events of the stream until ctx ends. A message is acked after its events are
// stored.
func (s *Server) ingest(ctx context.Context) {
	for pause := 100 * time.Millisecond; ctx.Err() == nil; pause = min(2*pause, 5*time.Second) {
		err := s.consume(ctx, func() { pause = 100 * time.Millisecond })
		if ctx.Err() != nil {
			return
		}
		s.deps.Log.WarnContext(ctx, "storing events failed and is repeated", "error", err, "after", pause)
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (s *Server) consume(ctx context.Context, progress func()) error {
	if err := s.deps.Stream.EnsureEvents(ctx); err != nil {
		return err
	}
	consumer, err := s.deps.Stream.Events(ctx)
	if err != nil {
		return err
	}
	trimmed := s.deps.Now()
	for {
		if now := s.deps.Now(); now.Sub(trimmed) >= s.cfg.TrimEvery {
			trimmed = now
			if err := s.deps.Stream.TrimEvents(ctx); err != nil {
				return err
			}
		}
		messages, err := consumer.Fetch(ctx, s.cfg.Fetch, 5*time.Second)
		if err != nil {
			return err
		}
		if err := s.store(ctx, messages); err != nil {
			return err
		}
		progress()
	}
}

func (s *Server) store(ctx context.Context, messages []*bus.Delivery) error {
	var events []*Event
	valid := messages[:0]
	for _, m := range messages {
		batch := &eventv1.EventBatch{}
		if err := m.Decode(batch); err != nil {
			s.deps.Log.WarnContext(ctx, "a message is not an EventBatch and was dropped", "subject", m.Subject(), "error", err)
			_ = m.Term("not an EventBatch")
			continue
		}
		of, foreign := ofSubject(m.Subject(), batch.GetEvents())
		if foreign > 0 {
			s.deps.Log.WarnContext(ctx, "events of other runs than that of their subject were dropped", "subject", m.Subject(), "events", foreign)
		}
		events = append(events, of...)
		valid = append(valid, m)
	}
	if err := s.append(ctx, events); err != nil {
		return err // not acked: the messages are redelivered
	}
	for _, m := range valid {
		_ = m.Ack() // if the ack is lost, the redelivered events are skipped
	}
	return nil
}

// ofSubject returns the events that may be published on a subject, and the number of the others.
// The workers of a run may publish on its subject alone, so what they say of other runs does not
// count.
func ofSubject(subject string, events []*Event) (of []*Event, foreign int) {
	if subject == names.MeshEvents {
		return events, 0
	}
	for _, e := range events {
		if names.RunEventSubject(e.GetRunId()) == subject {
			of = append(of, e)
		}
	}
	return of, len(events) - len(of)
}
