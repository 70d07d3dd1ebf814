package ingest

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

const (
	fetchWait     = 30 * time.Second // after an empty fetch of this length another one is sent
	fetchMessages = 256              // largest number of messages of a fetch
	progressEvery = time.Second      // well below the ack wait of the stream (libs/bus)
	retryFirst    = 20 * time.Millisecond
	retryLast     = time.Second
	retryIngest   = 500 * time.Millisecond // after a full disk or a locked database
)

// stream ingests the messages of a run's trajectory stream.
type stream struct {
	run      string
	source   Source
	ingest   func(ctx context.Context, r *request) error
	budget   func() uint64
	space    *space
	reporter *Reporter
	origins  *Origins
	log      *slog.Logger
}

// consume ingests until ctx ends.
func (s *stream) consume(ctx context.Context) {
	delay := retryFirst
	for ctx.Err() == nil {
		consumer, err := s.source.Trajectories(ctx, s.run)
		if err == nil {
			delay = retryFirst
			err = s.consumeFrom(ctx, consumer)
		}
		if ctx.Err() != nil {
			return
		}
		level := slog.LevelDebug // the scheduler creates the stream a moment later
		if delay >= retryLast {
			level = slog.LevelWarn
		}
		s.log.Log(ctx, level, "waiting for the run's trajectory stream (scheduler)", "error", err)
		pause(ctx, delay)
		delay = min(2*delay, retryLast)
	}
}

// consumeFrom fetches and ingests until the consumer fails.
func (s *stream) consumeFrom(ctx context.Context, consumer *bus.Consumer) error {
	largest := uint64(1)
	full := false
	for ctx.Err() == nil {
		s.space.wait(ctx, full)
		limit := max(1, min(fetchMessages, s.budget()/largest))
		deliveries, err := consumer.Fetch(ctx, int(limit), fetchWait)
		if err != nil {
			return err
		}
		for _, d := range deliveries {
			largest = max(largest, uint64(len(d.Data())))
		}
		full = false
		if len(deliveries) > 0 {
			full = outOfSpace(s.take(ctx, deliveries))
		}
	}
	return ctx.Err()
}

// take ingests some deliveries and settles each of them. After an error, which it has logged, they
// are delivered again.
func (s *stream) take(ctx context.Context, deliveries []*bus.Delivery) error {
	defer keepPending(deliveries)()
	ctx, span := begin(ctx, deliveries)
	defer span.End()
	var envelopes []*trajectoryv1.TrajectoryEnvelope
	var good, malformed []*bus.Delivery
	for _, d := range deliveries {
		batch := &trajectoryv1.TrajectoryBatch{}
		if err := d.Decode(batch); err != nil {
			malformed = append(malformed, d)
			continue
		}
		good = append(good, d)
		envelopes = append(envelopes, batch.GetTrajectories()...)
	}
	r := newRequest()
	r.malformed = len(malformed)
	r.add(envelopes)
	if err := s.ingest(ctx, r); err != nil {
		span.RecordError(err)
		if ctx.Err() != nil {
			return err // they are delivered again
		}
		s.log.ErrorContext(ctx, "ingest failed; the stream delivers the messages again", "messages", len(deliveries), "error", err)
		for _, d := range deliveries {
			_ = d.Nak(0) // if this is lost, the ack wait has the same effect
		}
		pause(ctx, retryIngest)
		return err
	}
	s.origins.add(span.SpanContext(), envelopes)
	crashpoint.Here("buffer/ingested") // rows are committed, messages not acknowledged
	for _, d := range malformed {
		_ = d.Term("not a TrajectoryBatch")
	}
	for _, d := range good {
		_ = d.Ack() // if this is lost, duplicates arrive and are dropped
	}
	crashpoint.Here("buffer/acknowledged")
	if len(malformed) > 0 {
		s.reporter.Event(eventv1.Level_LEVEL_WARN, "BAD_BODY", fmt.Sprintf("refused %d messages that are not a TrajectoryBatch", len(malformed)))
	}
	return nil
}

// keepPending sends progress for some deliveries until the returned function is called. Otherwise a
// blob store that is slower than the ack wait would get all of them again and again.
func keepPending(deliveries []*bus.Delivery) (stop func()) {
	done := make(chan struct{})
	var wait sync.WaitGroup
	wait.Go(func() {
		ticker := time.NewTicker(progressEvery)
		defer ticker.Stop()
		for {
			select {
			case <-done:
				return
			case <-ticker.C:
				for _, d := range deliveries {
					_ = d.Progress() // if this is lost, they are delivered again
				}
			}
		}
	})
	return func() {
		close(done)
		wait.Wait()
	}
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
