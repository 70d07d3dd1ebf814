package buffer

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/telemetry"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// busy is the segment that is written to.
func (f *feed) busy() uint32 {
	f.writing.Lock()
	defer f.writing.Unlock()
	return f.writer.Tail().Segment
}

// feed ingests the trajectories of one run, from the stream and from puts: take what is there, append the payloads that are not in a
// file yet, one fsync a file, one transaction, then answer. While that is under way the next ones gather, so the batch grows with the
// load.
type feed struct {
	service *Service
	run     string
	config  *bufferv1.LedgerConfig
	log     *slog.Logger
	loads   chan *load
	cancel  context.CancelFunc
	done    chan struct{}

	writing sync.Mutex // of writer, whose tail a trim reads
	writer  *segment.Writer
	noted   segment.Tail // end of the writer's segment as the ledger has it; of the goroutine that ingests
}

// load is what is ingested, or fails, as one: a fetch of the stream, or the puts of one call.
type load struct {
	puts      [][]Arrival // answered one by one
	malformed int         // messages that could not be read
	bytes     uint64      // of payloads to append
	tallies   []Tally     // of each put, once it is ingested
	done      chan error  // is sent one
}

const (
	fetchWait = 30 * time.Second // a fetch that finds nothing is asked again after that
	fetchMost = 256              // messages
	// progressEvery is well below the ack wait of the stream (libs/bus).
	progressEvery = time.Second
	retryFirst    = 20 * time.Millisecond
	retryLast     = time.Second
	retryIngest   = 500 * time.Millisecond // after a full disk or a locked database
)

// ingest starts the feed of a run unless it runs.
func (s *Service) ingest(run string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.feeds[run] != nil || s.life.Err() != nil {
		return nil
	}
	f := &feed{service: s, run: run, log: s.deps.Log.With(telemetry.AttrRun, run, telemetry.AttrEvent, false), loads: make(chan *load, fetchMost), done: make(chan struct{})}
	if err := f.open(s.life); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(s.life)
	f.cancel = cancel
	s.feeds[run] = f
	var wait sync.WaitGroup
	wait.Go(func() { f.work(ctx) })
	if s.deps.Bus != nil {
		wait.Go(func() { f.consume(ctx) })
	}
	go func() {
		defer close(f.done)
		wait.Wait()
		f.close()
	}()
	return nil
}

// close closes the files; everything that counts was synced.
func (f *feed) close() {
	f.writing.Lock()
	defer f.writing.Unlock()
	_ = f.writer.Close()
}

// open readies the segments: what a crash left beyond the ledger is cut off, what is short of it is told.
func (f *feed) open(ctx context.Context) error {
	s := f.service
	segments, known, err := f.segments(ctx)
	if err != nil {
		return err
	}
	var repair segment.Repair
	files := segment.Config{Dir: s.folder(f.run), RollBytes: s.cfg.SegmentBytes, Volatile: s.cfg.Durability == Process, Datasync: s.sync}
	newest := uint32(0)
	if len(segments) > 0 {
		newest = segments[len(segments)-1].Number
	}
	if v := s.vault(f.run); v != nil {
		taken, err := v.newest(ctx)
		if err != nil {
			return err
		}
		files.Volatile = true // what is durable lies in the blob store
		f.writer, repair, err = segment.OpenCache(files, known, max(newest, taken))
		if err != nil {
			return err
		}
	} else if f.writer, repair, err = segment.Open(files, known, newest); err != nil {
		return err
	}
	f.noted = f.writer.Tail()
	if repair.Cut > 0 {
		f.log.InfoContext(ctx, "removed segments that were begun and that the ledger does not know; what was in them comes again", "bytes", repair.Cut)
	}
	for _, short := range repair.Short {
		f.event(eventv1.Level_LEVEL_ERROR, "PAYLOAD_LOST",
			fmt.Sprintf("segment %d of %s lacks %d bytes that were durable: the disk lost them; go on from a snapshot", short.Segment, f.run, short.Bytes))
	}
	return nil
}

// segments are those of the ledger, and known those whose files are there; files that were trimmed are gone when it returns.
func (f *feed) segments(ctx context.Context) (segments []Segment, known []segment.Tail, err error) {
	s := f.service
	err = s.deps.Store.View(ctx, f.run, func(r Reader) (err error) {
		f.config = r.Ledger().Config
		segments, err = r.Segments(ctx)
		return err
	})
	for _, g := range segments {
		if !g.Trimmed {
			known = append(known, segment.Tail{Segment: g.Number, Bytes: g.Bytes})
		} else if _, err := segment.Remove(s.folder(f.run), g.Number); err != nil { // where a crash came between ledger and file
			return nil, nil, err
		}
	}
	return segments, known, err
}

func (f *feed) stop() {
	f.cancel()
	<-f.done
	f.service.gate.forget(f.run)
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
	full := false
	for ctx.Err() == nil {
		f.room(ctx, full)
		limit := max(1, min(fetchMost, f.service.share()/largest))
		deliveries, err := source.Fetch(ctx, int(limit), fetchWait)
		if err != nil {
			return err
		}
		for _, d := range deliveries {
			largest = max(largest, uint64(len(d.Data())))
		}
		full = false
		if len(deliveries) > 0 {
			full = outOfSpace(f.take(ctx, deliveries))
		}
	}
	return ctx.Err()
}

// take ingests some deliveries and ends each of them. An error was told, and what was delivered comes again.
func (f *feed) take(ctx context.Context, deliveries []*bus.Delivery) error {
	defer hold(deliveries)()
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
	l := newLoad()
	l.malformed = len(bad)
	f.weigh(l, envelopes)
	if err := f.ingest(ctx, l); err != nil {
		if ctx.Err() != nil {
			return err // they come again
		}
		f.log.ErrorContext(ctx, "ingest failed; the stream delivers again", "messages", len(deliveries), "error", err)
		for _, d := range deliveries {
			_ = d.Nak(0) // else the ack wait brings it back
		}
		pause(ctx, retryIngest)
		return err
	}
	crashpoint.Here("buffer/ingested") // rows are committed, messages not acknowledged
	for _, d := range bad {
		_ = d.Term("not a TrajectoryBatch")
	}
	for _, d := range good {
		_ = d.Ack() // a lost ack brings twins, which are dropped
	}
	crashpoint.Here("buffer/acknowledged")
	if len(bad) > 0 {
		f.event(eventv1.Level_LEVEL_WARN, "BAD_BODY", fmt.Sprintf("refused %d messages that are no TrajectoryBatch", len(bad)))
	}
	return nil
}

// hold tells the stream that some deliveries are being worked on until the returned function is called: a store of payloads that is
// slower than the ack wait would else get all of them again, and again.
func hold(deliveries []*bus.Delivery) (release func()) {
	done := make(chan struct{})
	var wait sync.WaitGroup
	wait.Go(func() {
		beat := time.NewTicker(progressEvery)
		defer beat.Stop()
		for {
			select {
			case <-done:
				return
			case <-beat.C:
				for _, d := range deliveries {
					_ = d.Progress() // lost, they come again
				}
			}
		}
	})
	return func() {
		close(done)
		wait.Wait()
	}
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
		s.deps.Log.Warn(message, telemetry.AttrRun, run, telemetry.AttrEvent, false)
		s.event(run, eventv1.Level_LEVEL_WARN, reason, message)
	}
}

func (s *Service) event(run string, level eventv1.Level, reason, message string) {
	s.deps.Events.Emit(&eventv1.Event{RunId: run, Service: names.BufferService, Level: level, Kind: "log", Message: message, Attributes: map[string]string{"reason": reason}})
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
