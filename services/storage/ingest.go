package storage

import (
	"context"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/bus"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// news wakes those who follow the log.
type news struct {
	mu      sync.Mutex
	changed chan struct{}
}

func (n *news) wait() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.changed == nil {
		n.changed = make(chan struct{})
	}
	return n.changed
}

func (n *news) tell() {
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
		s.news.tell()
	}
	return err
}

// ingest stores what arrives on the stream until ctx ends. A message is acked after its events are stored.
func (s *Server) ingest(ctx context.Context) {
	for pause := 100 * time.Millisecond; ctx.Err() == nil; pause = min(2*pause, 5*time.Second) {
		err := s.consume(ctx, func() { pause = 100 * time.Millisecond })
		if ctx.Err() != nil {
			return
		}
		s.deps.Log.WarnContext(ctx, "events are not stored at the moment, trying again", "error", err, "after", pause)
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
	for {
		messages, err := consumer.Fetch(ctx, s.cfg.Fetch, 5*time.Second)
		if err != nil {
			return err
		}
		if err := s.take(ctx, messages); err != nil {
			return err
		}
		progress()
	}
}

func (s *Server) take(ctx context.Context, messages []*bus.Delivery) error {
	var events []*Event
	good := messages[:0]
	for _, m := range messages {
		batch := &eventv1.EventBatch{}
		if err := m.Decode(batch); err != nil {
			s.deps.Log.WarnContext(ctx, "a message that holds no events was dropped", "subject", m.Subject(), "error", err)
			_ = m.Term("no EventBatch")
			continue
		}
		events = append(events, batch.GetEvents()...)
		good = append(good, m)
	}
	if err := s.append(ctx, events); err != nil {
		return err // not acked: they come again
	}
	for _, m := range good {
		_ = m.Ack() // where it is lost the events come again and are known
	}
	return nil
}
