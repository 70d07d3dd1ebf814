package ingest

import (
	"context"
	"errors"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// committer makes a group of requests durable: payloads first, then the rows that name them. Used
// by one goroutine.
type committer struct {
	run      string
	ledger   Ledger
	state    State
	queue    *FairQueue
	bucket   *segment.Bucket // nil: payloads are durable on the local disk
	reporter *Reporter
	writer   *segment.Writer
	recorded segment.Tail // end of the writer's segment in the ledger
}

// commit makes payloads and rows durable.
func (c *committer) commit(ctx context.Context, group []*request) error {
	samples, bytes := size(group)
	c.state.CountSamples(samples, bytes)
	if c.bucket != nil {
		return c.commitToBucket(ctx, group, bytes)
	}
	leave, err := c.queue.Enter(ctx, c.run, bytes)
	if err != nil {
		return err
	}
	defer leave()
	tail, err := c.append(group)
	if err != nil {
		return err
	}
	synced := make(chan error, 1)
	go func() { synced <- c.sync(tail) }() // while the statements of the transaction run
	waited := false
	wait := func() error {
		if waited {
			return nil
		}
		waited = true
		return <-synced
	}
	err = c.record(ctx, group, tail, wait)
	return errors.Join(err, wait())
}

// commitToBucket uploads the payloads before it waits for its turn and for the database, so that a
// slow bucket delays no other run.
func (c *committer) commitToBucket(ctx context.Context, group []*request, bytes uint64) error {
	tail, err := c.append(group)
	if err != nil {
		return err
	}
	if tail != c.recorded {
		if err := c.writer.Close(); err != nil {
			return err
		}
		if err := c.bucket.Upload(ctx, tail.Segment); err != nil {
			return err
		}
	}
	leave, err := c.queue.Enter(ctx, c.run, bytes)
	if err != nil {
		return err
	}
	defer leave()
	return c.record(ctx, group, tail, func() error { return nil })
}

// record writes the rows of a group. durable is called before the commit and returns when the
// payloads are durable.
func (c *committer) record(ctx context.Context, group []*request, tail segment.Tail, durable func() error) error {
	var puts [][]ledger.Arrival
	malformed := 0
	for _, r := range group {
		puts = append(puts, r.puts...)
		malformed += r.malformed
	}
	var tallies []ledger.Tally
	err := c.ledger.Update(ctx, func(tx ledger.Tx) (err error) {
		tx.Ledger().Refused += uint64(malformed)
		if tallies, err = ledger.Admit(ctx, tx, puts); err != nil {
			return err
		}
		if tail != c.recorded {
			if err := tx.PutSegment(ctx, ledger.Segment{Number: tail.Segment, Bytes: tail.Bytes}); err != nil {
				return err
			}
		}
		if err := durable(); err != nil {
			return err
		}
		crashpoint.Here("buffer/synced") // payloads are durable, the rows are not committed
		return nil
	})
	if err != nil {
		return err
	}
	c.recorded = tail
	var refused []ledger.Refusal
	for _, t := range tallies {
		refused = append(refused, t.Refused...)
	}
	for _, r := range group {
		r.tallies, tallies = tallies[:len(r.puts)], tallies[len(r.puts):]
	}
	c.reporter.Refused(refused)
	return nil
}

// append writes the payloads of a group to the segment and sets their places. It returns the end of
// the segment, which is the recorded one if nothing was appended.
func (c *committer) append(group []*request) (segment.Tail, error) {
	var records []segment.Record
	var owners []*ledger.Arrival
	for _, r := range group {
		for n, put := range r.puts {
			for i := range put {
				if payload := r.payloads[n][i]; payload != nil {
					records = append(records, segment.Record{Payload: payload, CRC: put[i].CRC})
					owners = append(owners, &put[i])
				}
			}
		}
	}
	if len(records) == 0 {
		return c.recorded, nil
	}
	places, err := c.writer.Append(records)
	if err != nil {
		return segment.Tail{}, err
	}
	for n, a := range owners {
		a.Segment, a.Offset, a.Length = places[n].Segment, places[n].Offset, places[n].Length
	}
	crashpoint.Here("buffer/appended") // payloads are written but not durable, and no row refers to them
	return c.writer.Tail(), nil
}

// sync makes what was appended durable.
func (c *committer) sync(tail segment.Tail) error {
	if tail == c.recorded { // nothing was appended
		return nil
	}
	return c.writer.Sync()
}

// close closes the segment. Everything that counts was synced.
func (c *committer) close() {
	_ = c.writer.Close()
	c.queue.Forget(c.run)
}

// size counts the samples of a group and the bytes of their payloads.
func size(group []*request) (samples int, bytes uint64) {
	for _, r := range group {
		for _, put := range r.puts {
			samples += len(put)
		}
		bytes += r.bytes
	}
	return samples, bytes
}
