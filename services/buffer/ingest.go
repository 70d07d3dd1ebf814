package buffer

import (
	"context"
	"errors"
	"fmt"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// find is the first arrival that is what is asked for; nil where none is.
func (l *load) find(is func(*Arrival) bool) *Arrival {
	for _, put := range l.puts {
		for i := range put {
			if is(&put[i]) {
				return &put[i]
			}
		}
	}
	return nil
}

func newLoad() *load { return &load{done: make(chan error, 1)} }

// weigh checks the payloads of one put and adds it to a load. It is done by who brings the put, beside what is being ingested.
func (f *feed) weigh(l *load, envelopes []*trajectoryv1.TrajectoryEnvelope) {
	arrivals := make([]Arrival, len(envelopes))
	for i, e := range envelopes {
		a := &arrivals[i]
		*a = Arrival{Header: e.GetHeader(), Ref: e.GetPayloadRef(), CRC: e.GetCrc32C()}
		switch {
		case !kept(e.GetHeader().GetOutcome()):
		case len(e.GetPayload()) > 0 && segment.CRC(e.GetPayload()) != e.GetCrc32C():
			a.Flaw = ReasonPayloadCorrupt
		case len(e.GetPayload()) > 0:
			a.Ref, a.payload = "", e.GetPayload()
			l.bytes += uint64(len(e.GetPayload()))
		case e.GetPayloadRef() == "":
			a.Flaw = ReasonPayloadMissing
		}
	}
	l.puts = append(l.puts, arrivals)
}

// kept reports whether a sample of this outcome is trained on.
func kept(o trajectoryv1.Outcome) bool {
	return o == trajectoryv1.Outcome_OUTCOME_COMPLETED || o == trajectoryv1.Outcome_OUTCOME_TRUNCATED
}

// ingest hands a load to the goroutine that ingests and waits until it is durable, or failed as a whole. ErrClosed, ErrLeaving.
func (f *feed) ingest(ctx context.Context, l *load) error {
	if err := f.offer(ctx, l); err != nil {
		return err
	}
	return f.await(ctx, l)
}

// offer hands a load to the goroutine that ingests, which takes them in this order. ErrClosed, ErrLeaving.
func (f *feed) offer(ctx context.Context, l *load) error {
	select {
	case f.loads <- l:
		return nil
	case <-f.done:
		return f.ended()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// await waits until a load that was offered is durable, or failed as a whole. ErrClosed, ErrLeaving.
func (f *feed) await(ctx context.Context, l *load) error {
	select {
	case err := <-l.done:
		return err
	case <-f.done:
		select {
		case err := <-l.done: // it was ingested at last
			return err
		default:
			return f.ended()
		}
	case <-ctx.Done():
		return ctx.Err() // it may be ingested still
	}
}

// ended says why nothing is ingested any more.
func (f *feed) ended() error {
	if f.service.life.Err() != nil {
		return ErrLeaving
	}
	return ErrClosed.With("run", f.run)
}

// work ingests loads until ctx ends: all that are there at once.
func (f *feed) work(ctx context.Context) {
	for {
		var loads []*load
		select {
		case <-ctx.Done():
			return
		case l := <-f.loads:
			loads = append(loads, l)
		}
		for size := loads[0].bytes; size < f.service.share() && len(f.loads) > 0; {
			l := <-f.loads // nobody else takes any
			loads, size = append(loads, l), size+l.bytes
		}
		err := f.accept(ctx, loads)
		if err != nil && ctx.Err() == nil {
			f.event(eventv1.Level_LEVEL_ERROR, "INGEST_FAILED", fmt.Sprintf("ingest failed and is tried again: %v", err))
		}
		for _, l := range loads {
			l.done <- err
		}
	}
}

// accept makes the payloads durable and writes the ledger.
func (f *feed) accept(ctx context.Context, loads []*load) error {
	samples, bytes := brought(loads)
	leave, err := f.service.gate.enter(ctx, f.run, bytes)
	if err != nil {
		return err
	}
	defer leave()
	f.service.hub(f.run).weigh(samples, bytes)
	if err := f.append(loads); err != nil {
		return err
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
	var refused []Refusal
	err = f.service.update(ctx, f.run, func(tx Tx) (err error) {
		if refused, err = admit(ctx, tx, loads); err != nil {
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
	if err = errors.Join(err, sync()); err != nil {
		return err
	}
	f.noted = tail
	f.service.report(f.run, refused)
	return nil
}

// brought counts the samples of some loads and the bytes of their payloads.
func brought(loads []*load) (samples int, bytes uint64) {
	for _, l := range loads {
		for _, put := range l.puts {
			for i := range put {
				samples++
				bytes += uint64(len(put[i].payload))
			}
		}
	}
	return samples, bytes
}

// endure makes what was written durable: on the disk, or as a sealed segment in the blob store.
func (f *feed) endure(ctx context.Context, tail segment.Tail) error {
	v := f.service.vault(f.run)
	switch {
	case tail == f.noted: // nothing was appended
		return nil
	case v == nil:
		return f.writer.Sync()
	}
	if err := f.writer.Close(); err != nil {
		return err
	}
	return v.seal(ctx, tail.Segment)
}

// append writes the payloads that are in no segment yet.
func (f *feed) append(loads []*load) error {
	var records []segment.Record
	var inline []*Arrival
	for _, l := range loads {
		for _, put := range l.puts {
			for i := range put {
				if put[i].payload != nil {
					records = append(records, segment.Record{Payload: put[i].payload, CRC: put[i].CRC})
					inline = append(inline, &put[i])
				}
			}
		}
	}
	if len(records) == 0 {
		return nil
	}
	f.writing.Lock()
	places, err := f.writer.Append(records)
	f.writing.Unlock()
	if err != nil {
		return err
	}
	for n, a := range inline {
		a.Place = places[n]
	}
	return nil
}
