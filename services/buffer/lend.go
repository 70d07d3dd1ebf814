package buffer

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"time"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// lentIdle is how long a segment stays lent without a put: its producer is gone, or has nothing to say and lends another.
const lentIdle = 10 * time.Minute

// spareSegments is how many files are kept of a run to be lent again, by their bytes.
const spareSegments = 6

// lent is a segment that a producer on this host appends to.
type lent struct {
	file *segment.Lent
	id   uint64    // drawn at random: after a restart a number may be another file's
	end  uint64    // what the ledger counts on; of the goroutine that ingests
	used time.Time // when it was last named; under the feed's lock
}

// lend begins a segment for a producer. ErrNoLedger, ErrClosed, ErrLeaving, ErrNotLending.
func (s *Service) lend(ctx context.Context, req *bufferv1.LendSegmentRequest) (*bufferv1.LendSegmentResponse, error) {
	if s.deps.Blobs != nil {
		return nil, ErrNotLending
	}
	f, err := s.feed(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	l, err := f.lend()
	if err != nil {
		return nil, err
	}
	folder, err := filepath.Abs(s.folder(f.run))
	if err != nil {
		return nil, fmt.Errorf("lend segment: %w", err)
	}
	return &bufferv1.LendSegmentResponse{
		Segment: l.file.Number(), Path: segment.Path(folder, l.file.Number()), Inode: l.file.Inode(), Offset: l.file.Begin(),
		RollBytes: s.cfg.SegmentBytes, Lending: l.id, BootId: segment.BootID(),
	}, nil
}

func (f *feed) lend() (*lent, error) {
	f.lending.Lock()
	defer f.lending.Unlock()
	if f.lent == nil {
		return nil, f.ended()
	}
	now := time.Now()
	for number, l := range f.lent {
		if now.Sub(l.used) > lentIdle {
			f.revoke(number)
		}
	}
	file, err := f.writer.Lend()
	if err != nil {
		return nil, err
	}
	l := &lent{file: file, id: max(1, rand.Uint64()), used: now} // 0 names none
	f.lent[file.Number()] = l
	return l, nil
}

// finish ends the lendings that their producer is done with, by their ids or, of an older producer, by the segments' numbers.
func (f *feed) finish(returned []uint64, finished []uint32) {
	if len(returned)+len(finished) == 0 {
		return
	}
	f.lending.Lock()
	defer f.lending.Unlock()
	for _, number := range finished {
		f.revoke(number)
	}
	for number, l := range f.lent {
		if slices.Contains(returned, l.id) {
			f.closed[number] = true
			f.revoke(number)
		}
	}
}

// revoke ends the lending of a segment, under the lock. What the ledger counts on stays.
func (f *feed) revoke(number uint32) {
	l := f.lent[number]
	delete(f.lent, number)
	if l != nil && !slices.ContainsFunc(f.claims, func(c claim) bool { return c.lent == l }) {
		_ = l.file.Close() // what counts was synced
	}
}

// start lets the disk begin with what a put has written into a lent file, while its bytes are checked and the puts before it are ingested.
func (f *feed) start(envelopes []*trajectoryv1.TrajectoryEnvelope) {
	var first, last *trajectoryv1.PayloadPlace
	for _, e := range envelopes {
		at := e.GetPlace()
		switch {
		case at == nil:
			continue
		case first == nil:
			first = at
		case at.GetSegment() != first.GetSegment(), at.GetOffset() < last.GetOffset():
			return // no put of our clients
		}
		last = at
	}
	if first == nil {
		return
	}
	f.lending.Lock()
	l := f.lent[first.GetSegment()]
	f.lending.Unlock()
	if l != nil && l.id == first.GetLending() {
		l.file.Start(segment.Place{Offset: first.GetOffset()}, segment.Place{Offset: last.GetOffset(), Length: last.GetLength()})
	}
}

// inspect checks a payload that its producer has written. ErrNotLent.
func (f *feed) inspect(a *Arrival, at *trajectoryv1.PayloadPlace) error {
	place := segment.Place{Segment: at.GetSegment(), Offset: at.GetOffset(), Length: at.GetLength()}
	f.lending.Lock()
	l := f.lent[place.Segment]
	if l != nil && at.GetLending() != 0 && at.GetLending() != l.id {
		l = nil // the number of a file that was lent before; this one is another producer's
	}
	if l != nil {
		l.used = time.Now()
	}
	f.lending.Unlock()
	if l == nil {
		return ErrNotLent.With("run", f.run).With("segment", fmt.Sprint(place.Segment))
	}
	if err := l.file.Check(place, a.CRC); err != nil {
		f.lending.Lock()
		defer f.lending.Unlock()
		if f.lent[place.Segment] != l { // it was closed meanwhile
			return ErrNotLent.With("run", f.run).With("segment", fmt.Sprint(place.Segment))
		}
		f.log.Warn("a producer wrote a payload that is not what it says", "error", err)
		a.Flaw = ReasonPayloadCorrupt
		f.revoke(place.Segment) // no row reaches past the flaw
		return nil
	}
	a.Place, a.lent = place, l
	return nil
}

// claim is a lent segment that is being ingested from, and what the ledger will count on of it.
type claim struct {
	lent *lent
	tail segment.Tail
}

// claim keeps the segments that the loads name until release: they are neither closed nor trimmed. Loads that name one which is lent no
// more are answered with ErrNotLent; it returns the others.
func (f *feed) claim(loads []*load) (held []*load) {
	f.lending.Lock()
	defer f.lending.Unlock()
	ends := map[*lent]uint64{}
	for _, l := range loads {
		gone := l.find(func(a *Arrival) bool { return a.lent != nil && f.lent[a.Place.Segment] != a.lent })
		if gone != nil {
			l.done <- ErrNotLent.With("run", f.run).With("segment", fmt.Sprint(gone.Place.Segment))
			continue
		}
		held = append(held, l)
		l.find(func(a *Arrival) bool {
			if a.lent != nil {
				ends[a.lent] = max(ends[a.lent], a.lent.end, a.Place.Offset+a.Place.Length)
			}
			return false
		})
	}
	for l, end := range ends {
		f.claims = append(f.claims, claim{l, segment.Tail{Segment: l.file.Number(), Bytes: end}})
	}
	slices.SortFunc(f.claims, func(a, b claim) int { return cmp.Compare(a.tail.Segment, b.tail.Segment) })
	return held
}

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

// release ends a claim.
func (f *feed) release(ingested bool) {
	f.lending.Lock()
	defer f.lending.Unlock()
	for _, c := range f.claims {
		if ingested {
			c.lent.end = c.tail.Bytes
		}
		if f.lent[c.tail.Segment] != c.lent {
			_ = c.lent.file.Close()
		}
	}
	f.claims = nil
}

// syncLent makes the claimed segments durable. One that can't be synced is lent no more: the kernel may have dropped any of it.
func (f *feed) syncLent() error {
	for _, c := range f.claims {
		if err := c.lent.file.Sync(); err != nil {
			f.lending.Lock()
			f.revoke(c.tail.Segment)
			f.lending.Unlock()
			return err
		}
	}
	return nil
}

// busy is the segments that are written to.
func (f *feed) busy() map[uint32]bool {
	f.lending.Lock()
	defer f.lending.Unlock()
	numbers := map[uint32]bool{f.writer.Tail().Segment: true}
	for number := range f.lent {
		numbers[number] = true
	}
	for _, c := range f.claims {
		numbers[c.tail.Segment] = true
	}
	return numbers
}

// drop removes the file of a segment that the ledger has trimmed, or keeps it to be lent again where its producer has closed it, and says
// how large it was. A producer that fell silent may still write to its own.
func (f *feed) drop(number uint32) (uint64, error) {
	f.lending.Lock()
	defer f.lending.Unlock()
	if f.lent == nil || !f.closed[number] {
		return segment.Remove(f.writer.Dir, number)
	}
	delete(f.closed, number)
	return f.writer.Spare(number)
}

// discard gives the disk back what is kept to be lent again.
func (f *feed) discard() {
	f.lending.Lock()
	defer f.lending.Unlock()
	if err := f.writer.Discard(); err != nil {
		f.log.Warn("spare segments stay on a full disk", "error", err)
	}
}
