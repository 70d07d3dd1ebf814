package buffer

import (
	"context"
	"fmt"
	"time"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// lease returns the batch of a step; where it is not ready within wait, nil and what it waits for.
func (s *Service) lease(ctx context.Context, run string, step uint64, wait time.Duration) (*bufferv1.Batch, string, error) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for over := wait <= 0; ; {
		state, changed, err := s.state(ctx, run)
		if err != nil {
			return nil, "", err
		}
		batch, waiting, err := s.tryLease(ctx, run, step)
		if err != nil || batch != nil || over {
			return batch, waiting, err
		}
		for again := false; !again && !over; {
			select {
			case <-changed:
				last := state
				if state, changed, err = s.state(ctx, run); err != nil {
					return nil, "", err
				}
				again = s.worthALook(run, step, last, state)
			case <-timer.C: // a last look says what it waits for now
				over = true
			case <-s.life.Done():
				return nil, waiting, nil
			case <-ctx.Done():
				return nil, "", ctx.Err()
			}
		}
	}
}

// worthALook reports whether a change of the ledger can mean a batch for the step, or a stale group to dissolve: a ledger changes with
// every put, and to look costs more than a small one.
func (s *Service) worthALook(run string, step uint64, last, now *bufferv1.LedgerState) bool {
	s.mu.Lock()
	f := s.feeds[run]
	s.mu.Unlock()
	switch {
	case f == nil, now.GetLeased() > 0, now.GetStep() >= step:
		return true
	case now.GetReady()+now.GetExcluded()-now.GetSkipped() >= uint64(f.config.GetGroupsPerStep()):
		return true
	}
	return f.config.GetReceipts() && now.GetReady() > last.GetReady()
}

// tryLease looks without a write lock first: most looks find that something is missing.
func (s *Service) tryLease(ctx context.Context, run string, step uint64) (batch *bufferv1.Batch, waiting string, err error) {
	due := false
	err = s.deps.Store.View(ctx, run, func(r Reader) error {
		d, err := look(ctx, r, step)
		if err != nil {
			return err
		}
		if d.known != nil {
			batch, err = s.batch(ctx, r, d.known)
			return err
		}
		if r.Ledger().Groups[Dissolved] > 0 {
			lost, err := r.ListGroups(ctx, GroupQuery{States: []State{Dissolved}, Limit: 1})
			if err != nil {
				return err
			}
			if len(lost) > 0 {
				d.lost = lost[0]
			}
		}
		due, waiting = d.full(r.Ledger()) || len(d.stale) > 0, d.waiting(r.Ledger(), step)
		return d.enough(r.Ledger(), step)
	})
	if err != nil || !due {
		return batch, waiting, err
	}
	err = s.update(ctx, run, func(tx Tx) error {
		leased, d, err := lease(ctx, tx, step)
		if err != nil {
			return err
		}
		if !leased {
			waiting = d.waiting(tx.Ledger(), step)
			return nil
		}
		batch, err = s.render(tx.Ledger(), d.known, d.samples)
		return err
	})
	if batch != nil {
		crashpoint.Here("buffer/leased") // groups are leased, the controller does not know
	}
	return batch, waiting, err
}

// batch renders the batch of a step.
func (s *Service) batch(ctx context.Context, r Reader, step *Step) (*bufferv1.Batch, error) {
	samples, err := r.BatchSamples(ctx, step.Step)
	if err != nil {
		return nil, err
	}
	return s.render(r.Ledger(), step, samples)
}

func (s *Service) render(l *Ledger, step *Step, samples []Sample) (*bufferv1.Batch, error) {
	if uint32(len(samples)) != step.Samples {
		return nil, fmt.Errorf("batch of step %d: %d samples recorded, %d there", step.Step, step.Samples, len(samples))
	}
	return &bufferv1.Batch{
		RunId: l.Run, Step: step.Step, BatchId: step.Batch, Groups: step.Groups, Excluded: step.Excluded, Samples: s.refs(l, samples),
		ZeroAdvantage: step.Zero, ZeroAdvantageReward: step.ZeroReward,
	}, nil
}
