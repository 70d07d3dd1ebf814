package buffer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// feed ingests the trajectories of one run: fetch what is there, append all payloads, one fsync, one transaction, then ack.
// While that is under way the next messages gather, so the batch grows with the load.
type feed struct {
	service *Service
	run     string
	log     *slog.Logger
	writer  *segment.Writer
	noted   segment.Tail // end of the segment as the ledger has it
	cancel  context.CancelFunc
	done    chan struct{}
}

const (
	fetchWait   = 30 * time.Second // a fetch that finds nothing is asked again after that
	fetchMost   = 256              // messages
	retryFirst  = 20 * time.Millisecond
	retryLast   = time.Second
	retryIngest = 500 * time.Millisecond // after a full disk or a locked database
)

// ingest starts the feed of a run unless it runs.
func (s *Service) ingest(run string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.feeds[run] != nil || s.life.Err() != nil {
		return nil
	}
	f := &feed{service: s, run: run, log: s.deps.Log.With("run_id", run), done: make(chan struct{})}
	if err := f.open(s.life); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(s.life)
	f.cancel = cancel
	s.feeds[run] = f
	go func() {
		defer close(f.done)
		defer func() { _ = f.writer.Close() }() // everything that counts was synced
		if s.deps.Bus != nil {
			f.consume(ctx)
		}
		<-ctx.Done()
	}()
	return nil
}

// open readies the segments: what a crash left beyond the ledger is cut off, what is short of it is told.
func (f *feed) open(ctx context.Context) error {
	s := f.service
	var segments []Segment
	err := s.deps.Store.View(ctx, f.run, func(r Reader) (err error) {
		segments, err = r.Segments(ctx)
		return err
	})
	if err != nil {
		return err
	}
	var tail segment.Tail
	for _, g := range segments {
		tail = segment.Tail{Segment: g.Number, Bytes: g.Bytes}
		if g.Trimmed { // where a crash came between ledger and file
			if _, err := segment.Remove(s.folder(f.run), g.Number); err != nil {
				return err
			}
		}
	}
	var repair segment.Repair
	if v := s.vault(f.run); v != nil {
		var newest uint32
		if newest, err = v.newest(ctx); err == nil {
			f.writer, repair, err = segment.OpenAfter(v.dir, tail.Segment, newest, s.cfg.SegmentBytes)
		}
	} else {
		f.writer, repair, err = segment.Open(s.folder(f.run), tail, s.cfg.SegmentBytes, s.cfg.Replicated)
	}
	if err != nil {
		return err
	}
	f.noted = f.writer.Tail()
	if repair.Cut > 0 {
		f.log.InfoContext(ctx, "cut a torn tail off the segments; the stream delivers it again", "bytes", repair.Cut)
	}
	if repair.Missing > 0 {
		f.event(eventv1.Level_LEVEL_ERROR, "PAYLOAD_LOST",
			fmt.Sprintf("segment %d of %s lacks %d bytes that were durable: the disk lost them; go on from a snapshot", tail.Segment, f.run, repair.Missing))
	}
	return nil
}

func (f *feed) stop() {
	f.cancel()
	<-f.done
}

// consume runs until ctx ends.
func (f *feed) consume(ctx context.Context) {
	delay := retryFirst
	for ctx.Err() == nil {
		source, err := f.service.deps.Bus.Trajectories(ctx, f.run)
		if err == nil {
			delay = retryFirst
			err = f.drink(ctx, source)
		}
		if ctx.Err() != nil {
			return
		}
		level := slog.LevelDebug // the scheduler makes the stream a moment later
		if delay >= retryLast {
			level = slog.LevelWarn
		}
		f.log.Log(ctx, level, "ingest waits for the run's trajectory stream (scheduler)", "error", err)
		pause(ctx, delay)
		delay = min(2*delay, retryLast)
	}
}

// drink fetches and ingests until the source fails.
func (f *feed) drink(ctx context.Context, source *bus.Consumer) error {
	largest := uint64(1)
	for {
		limit := max(1, min(fetchMost, f.service.cfg.FetchBytes/largest))
		deliveries, err := source.Fetch(ctx, int(limit), fetchWait)
		if err != nil {
			return err
		}
		for _, d := range deliveries {
			largest = max(largest, uint64(len(d.Data())))
		}
		if len(deliveries) > 0 {
			f.take(ctx, deliveries)
		}
	}
}

// take ingests some deliveries and ends each of them.
func (f *feed) take(ctx context.Context, deliveries []*bus.Delivery) {
	var envelopes []*trajectoryv1.TrajectoryEnvelope
	var good, bad []*bus.Delivery
	for _, d := range deliveries {
		batch := &trajectoryv1.TrajectoryBatch{}
		if err := d.Decode(batch); err != nil {
			bad = append(bad, d)
			continue
		}
		good = append(good, d)
		envelopes = append(envelopes, batch.GetTrajectories()...)
	}
	tally, err := f.accept(ctx, envelopes, len(bad))
	if err != nil {
		if ctx.Err() != nil {
			return // they come again
		}
		f.log.ErrorContext(ctx, "ingest failed; the stream delivers again", "messages", len(deliveries), "error", err)
		f.event(eventv1.Level_LEVEL_ERROR, "INGEST_FAILED", fmt.Sprintf("ingest failed and is tried again: %v", err))
		for _, d := range deliveries {
			_ = d.Nak(0) // else the ack wait brings it back
		}
		pause(ctx, retryIngest)
		return
	}
	crashpoint.Here("buffer/ingested") // rows are committed, messages not acknowledged
	for _, d := range bad {
		_ = d.Term("not a TrajectoryBatch")
	}
	for _, d := range good {
		_ = d.Ack() // a lost ack brings twins, which are dropped
	}
	crashpoint.Here("buffer/acknowledged")
	f.service.report(f.run, tally.Refused)
	if len(bad) > 0 {
		f.event(eventv1.Level_LEVEL_WARN, "BAD_BODY", fmt.Sprintf("refused %d messages that are no TrajectoryBatch", len(bad)))
	}
}

// accept makes the payloads durable and writes the ledger. malformed counts messages that could not be read.
func (f *feed) accept(ctx context.Context, envelopes []*trajectoryv1.TrajectoryEnvelope, malformed int) (tally Tally, err error) {
	arrivals, err := f.append(envelopes)
	if err != nil {
		return tally, err
	}
	tail := f.writer.Tail()
	crashpoint.Here("buffer/appended") // payloads are written, not durable, and no row names them
	synced := make(chan error, 1)
	go func() { synced <- f.endure(ctx, tail) }() // beside the transaction's statements; its commit waits for both
	waited := false
	sync := func() error {
		if waited {
			return nil
		}
		waited = true
		return <-synced
	}
	err = f.service.update(ctx, f.run, func(tx Tx) (err error) {
		tx.Ledger().Refused += uint64(malformed)
		if tally, err = admit(ctx, tx, arrivals); err != nil {
			return err
		}
		if tail != f.noted {
			if err := tx.PutSegment(ctx, Segment{Number: tail.Segment, Bytes: tail.Bytes}); err != nil {
				return err
			}
		}
		if err := sync(); err != nil {
			return err
		}
		crashpoint.Here("buffer/synced") // payloads are durable, the rows are not committed
		return nil
	})
	if err = errors.Join(err, sync()); err == nil {
		f.noted = tail
	}
	return tally, err
}

// endure makes what was appended durable: on the disk, or as a sealed segment in the blob store.
func (f *feed) endure(ctx context.Context, tail segment.Tail) error {
	v := f.service.vault(f.run)
	switch {
	case v == nil:
		return f.writer.Sync()
	case tail == f.noted: // nothing was appended
		return nil
	}
	if err := f.writer.Close(); err != nil {
		return err
	}
	return v.seal(ctx, tail.Segment)
}

// append writes the inline payloads that are whole and says where each is.
func (f *feed) append(envelopes []*trajectoryv1.TrajectoryEnvelope) ([]Arrival, error) {
	arrivals := make([]Arrival, len(envelopes))
	records := make([]segment.Record, 0, len(envelopes))
	inline := make([]int, 0, len(envelopes))
	for i, e := range envelopes {
		a := &arrivals[i]
		*a = Arrival{Header: e.GetHeader(), Ref: e.GetPayloadRef(), CRC: e.GetCrc32C()}
		switch {
		case !kept(e.GetHeader().GetOutcome()):
		case len(e.GetPayload()) > 0 && segment.CRC(e.GetPayload()) != e.GetCrc32C():
			a.Flaw = ReasonPayloadCorrupt
		case len(e.GetPayload()) > 0:
			a.Ref = ""
			records = append(records, segment.Record{Payload: e.GetPayload(), CRC: e.GetCrc32C()})
			inline = append(inline, i)
		case e.GetPayloadRef() == "":
			a.Flaw = ReasonPayloadMissing
		}
	}
	if len(records) == 0 {
		return arrivals, nil
	}
	places, err := f.writer.Append(records)
	for n, i := range inline {
		if err == nil {
			arrivals[i].Place = places[n]
		}
	}
	return arrivals, err
}

// kept reports whether a sample of this outcome is trained on.
func kept(o trajectoryv1.Outcome) bool {
	return o == trajectoryv1.Outcome_OUTCOME_COMPLETED || o == trajectoryv1.Outcome_OUTCOME_TRUNCATED
}

// report tells of refused trajectories: one event a reason, with the first of them.
func (s *Service) report(run string, refused []Refusal) {
	var reasons []string
	first, count := map[string]Refusal{}, map[string]int{}
	for _, r := range refused {
		if count[r.Reason]++; count[r.Reason] == 1 {
			reasons = append(reasons, r.Reason)
			first[r.Reason] = r
		}
	}
	for _, reason := range slices.Sorted(slices.Values(reasons)) {
		message := fmt.Sprintf("refused %d trajectories, first %s", count[reason], first[reason])
		s.deps.Log.Warn(message, "run_id", run)
		s.event(run, eventv1.Level_LEVEL_WARN, reason, message)
	}
}

func (s *Service) event(run string, level eventv1.Level, reason, message string) {
	s.deps.Events.Emit(&eventv1.Event{RunId: run, Service: "buffer", Level: level, Kind: "log", Message: message, Attributes: map[string]string{"reason": reason}})
}

func (f *feed) event(level eventv1.Level, reason, message string) {
	f.service.event(f.run, level, reason, message)
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
