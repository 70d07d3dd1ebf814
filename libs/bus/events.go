package bus

import (
	"context"
	"fmt"
	"time"

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
