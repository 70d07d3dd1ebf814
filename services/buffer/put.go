package buffer

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// put takes samples into the ledger; they are durable when it returns. ErrNoLedger, ErrClosed, ErrLeaving, ErrNotLent, ErrIngest,
// ErrDiskFull.
func (s *Service) put(ctx context.Context, req *bufferv1.PutTrajectoriesRequest) ([]Tally, error) {
	p, err := s.offer(ctx, req)
	if err != nil {
		return nil, err
	}
	return p.await(ctx)
}

// offered is a put that is being ingested.
type offered struct {
	feed     *feed
	load     *load
	returned []uint64
	finished []uint32
}

// offer checks what a put brings and hands it to the run's ingest. The errors of put.
func (s *Service) offer(ctx context.Context, req *bufferv1.PutTrajectoriesRequest) (*offered, error) {
	f, err := s.feed(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	if why := f.lacks(ctx, false); why != "" {
		return nil, ErrDiskFull.With("run", f.run).WithMessage("no samples are taken: %s", why)
	}
	l := newLoad()
	for _, batch := range req.GetPuts() {
		if err := f.weigh(l, batch.GetTrajectories()); err != nil {
			return nil, err
		}
	}
	if len(l.puts) > 0 {
		if err := f.offer(ctx, l); err != nil {
			return nil, err
		}
	}
	return &offered{f, l, req.GetReturned(), req.GetFinished()}, nil
}

// await waits until the samples are durable. The errors of put.
func (p *offered) await(ctx context.Context) ([]Tally, error) {
	f, l := p.feed, p.load
	if len(l.puts) > 0 {
		if err := f.await(ctx, l); err != nil {
			if outOfSpace(err) {
				return nil, ErrDiskFull.With("run", f.run).WithMessage("no samples are taken: %s", f.lacks(ctx, true))
			}
			if _, domain := rpcerr.From(err); domain || ctx.Err() != nil {
				return nil, err
			}
			return nil, ErrIngest.Wrap(err)
		}
	}
	f.finish(p.returned, p.finished)
	return l.tallies, nil
}

// streamed is how many requests of one stream are in hand at a time: one is checked while another is made durable. They are ingested in their order.
const streamed = 4

// stream puts request after request and answers each in turn. The first that fails ends it. ErrLeaving.
func (s *Service) stream(ctx context.Context, receive func() (*bufferv1.PutTrajectoriesRequest, error), send func(*bufferv1.PutTrajectoriesResponse) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type entry struct {
		put *offered
		err error
	}
	taken := make(chan entry, streamed)
	received := make(chan error, 1)
	go func() { // ends with the stream, which is when this call has returned
		defer close(taken)
		for {
			req, err := receive()
			if err != nil {
				received <- err
				return
			}
			p, err := s.offer(ctx, req)
			select {
			case taken <- entry{p, err}:
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		select {
		case e, more := <-taken:
			if !more {
				return ended(<-received)
			}
			if e.err != nil {
				return e.err
			}
			tallies, err := e.put.await(ctx)
			if err != nil {
				return err
			}
			if err := send(putResults(tallies)); err != nil {
				return err
			}
		case <-s.life.Done():
			return ErrLeaving
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// ended is the error of a stream that its caller has ended.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// feed is the ingest of a run; it is started where the ledger is open and that was not done yet. ErrNoLedger, ErrClosed, ErrLeaving.
func (s *Service) feed(ctx context.Context, run string) (*feed, error) {
	find := func() *feed {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.feeds[run]
	}
	if f := find(); f != nil {
		return f, nil
	}
	closed := false
	err := s.deps.Store.View(ctx, run, func(r Reader) error {
		closed = r.Ledger().Closed
		return nil
	})
	if err != nil {
		return nil, err
	}
	if closed {
		return nil, ErrClosed.With("run", run)
	}
	if err := s.ingest(run); err != nil {
		return nil, fmt.Errorf("ingest of %s: %w", run, err)
	}
	if f := find(); f != nil {
		return f, nil
	}
	return nil, ErrLeaving
}

func putResults(tallies []Tally) *bufferv1.PutTrajectoriesResponse {
	out := &bufferv1.PutTrajectoriesResponse{Results: make([]*bufferv1.PutResult, len(tallies))}
	for i := range tallies {
		out.Results[i] = putResult(&tallies[i])
	}
	return out
}

func putResult(t *Tally) *bufferv1.PutResult {
	r := &bufferv1.PutResult{Accepted: uint32(t.Accepted), Duplicates: uint32(t.Duplicates), Failed: uint32(t.Failed)}
	for _, refused := range t.Refused {
		r.Refused = append(r.Refused, &bufferv1.PutRefusal{Trajectory: uint32(refused.Place), Reason: refused.Reason})
	}
	return r
}
