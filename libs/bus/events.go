package bus

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollout-rl/rollout/proto/gen/names"
)

// EventsStored waits until the storage service has taken every event that was on the bus when it
// was called.
func (b *Bus) EventsStored(ctx context.Context) error {
	s, err := b.stream(ctx, names.EventStream)
	if err != nil {
		return fmt.Errorf("mark the events: %w", mapError(err))
	}
	mark := s.CachedInfo().State.LastSeq
	consumer, err := b.Events(ctx)
	if err != nil {
		return err
	}
	for pause := 2 * time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		info, err := ask(ctx, consumer.c.Info)
		if err != nil {
			return fmt.Errorf("how far the events are stored: %w", mapError(err))
		}
		if info.AckFloor.Stream >= mark || info.NumPending == 0 && info.NumAckPending == 0 {
			return nil
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%d events wait to be stored: %w", info.NumPending+uint64(max(0, info.NumAckPending)), ctx.Err())
		case <-timer.C:
		}
	}
}

// TrimEvents removes the events that the storage service has taken from the bus. Their stream has
// limits for what waits for a storage service that is down, not for what is stored.
func (b *Bus) TrimEvents(ctx context.Context) error {
	s, err := b.stream(ctx, names.EventStream)
	if err != nil {
		return fmt.Errorf("trim the events: %w", mapError(err))
	}
	consumer, err := b.Events(ctx)
	if err != nil {
		return err
	}
	info, err := ask(ctx, consumer.c.Info)
	if err != nil {
		return fmt.Errorf("how far the events are stored: %w", mapError(err))
	}
	taken := info.AckFloor.Stream
	if taken < s.CachedInfo().State.FirstSeq {
		return nil
	}
	if err := order(ctx, func(ctx context.Context) error { return s.Purge(ctx, jetstream.WithPurgeSequence(taken+1)) }); err != nil {
		return fmt.Errorf("trim the events: %w", mapError(err))
	}
	return nil
}
