package buffer

import (
	"context"
	"fmt"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// put takes samples into the ledger; they are durable when it returns. ErrNoLedger, ErrClosed, ErrLeaving, ErrIngest, ErrDiskFull.
func (s *Service) put(ctx context.Context, req *bufferv1.PutTrajectoriesRequest) ([]Tally, error) {
	f, err := s.feed(ctx, req.GetRunId())
	if err != nil {
		return nil, err
	}
	if why := f.lacks(ctx, false); why != "" {
		return nil, ErrDiskFull.With("run", f.run).WithMessage("no samples are taken: %s", why)
	}
	l := newLoad()
	for _, batch := range req.GetPuts() {
		f.weigh(l, batch.GetTrajectories())
	}
	if len(l.puts) == 0 {
		return nil, nil
	}
	err = f.ingest(ctx, l)
	if outOfSpace(err) {
		return nil, ErrDiskFull.With("run", f.run).WithMessage("no samples are taken: %s", f.lacks(ctx, true))
	}
	if _, domain := rpcerr.From(err); err != nil && !domain && ctx.Err() == nil {
		return nil, ErrIngest.Wrap(err)
	}
	return l.tallies, err
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
