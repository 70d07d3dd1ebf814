package buffer

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// leases gives out the batches of steps.
type leases struct {
	cfg  Config
	life context.Context // ends when the service shuts down
}

// lease returns the batch of a step. If it is not ready within wait, it returns nil and what the
// step waits for. fence.ErrFenced.
func (l *leases) lease(ctx context.Context, r *run, step uint64, wait time.Duration, by *fencev1.Fence) (*bufferv1.Batch, []*waitv1.Wait, error) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for expired := wait <= 0; ; {
		state, changed, err := r.current(ctx)
		if err != nil {
			return nil, nil, err
		}
		batch, waits, config, err := l.try(ctx, r, step, by)
		if err != nil || batch != nil {
			return batch, nil, err
		}
		if failing := r.state.ingestWait(); failing != nil {
			waits = append(waits, failing)
		}
		if expired {
			return nil, waits, nil
		}
		for retry := false; !retry && !expired; {
			select {
			case <-changed:
				last := state
				if state, changed, err = r.current(ctx); err != nil {
					return nil, nil, err
				}
				retry = ledger.MayLease(config, step, last, state)
			case <-timer.C: // a last attempt tells what the step waits for now
				expired = true
			case <-l.life.Done():
				return nil, waits, nil
			case <-ctx.Done():
				return nil, nil, ctx.Err()
			}
		}
	}
}

// try leases the step if it is ready. It needs no write transaction if it is not.
func (l *leases) try(ctx context.Context, r *run, step uint64, by *fencev1.Fence) (batch *bufferv1.Batch, waits []*waitv1.Wait, config *bufferv1.LedgerConfig, err error) {
	var ready ledger.Readiness
	err = r.View(ctx, func(reader ledger.Reader) error {
		config = reader.Ledger().Config
		if err := reader.Admit(ctx, by); err != nil {
			return err
		}
		if ready, err = ledger.CheckReadiness(ctx, reader, step); err != nil || ready.Step == nil {
			return err
		}
		batch, err = l.batch(ctx, reader, ready.Step)
		return err
	})
	if err != nil || !ready.Due {
		return batch, ready.Waits, config, err
	}
	err = r.Update(ctx, func(tx ledger.Tx) error {
		if err := tx.Admit(ctx, by); err != nil {
			return err
		}
		result, err := ledger.Lease(ctx, tx, step)
		if err != nil {
			return err
		}
		batch, waits = nil, result.Waits
		if result.Step != nil {
			batch, err = l.message(tx.Ledger(), result.Step, result.Samples)
		}
		return err
	})
	if err != nil {
		return nil, nil, config, err
	}
	if batch != nil {
		crashpoint.Here("buffer/leased") // groups are leased, the controller does not know
	}
	return batch, waits, config, nil
}

// batch is the batch of a leased or committed step.
func (l *leases) batch(ctx context.Context, r ledger.Reader, step *ledger.Step) (*bufferv1.Batch, error) {
	samples, err := r.BatchSamples(ctx, step.Step)
	if err != nil {
		return nil, err
	}
	return l.message(r.Ledger(), step, samples)
}

func (l *leases) message(of *ledger.Ledger, step *ledger.Step, samples []ledger.Sample) (*bufferv1.Batch, error) {
	if uint32(len(samples)) != step.Samples {
		return nil, fmt.Errorf("batch of step %d: %d samples were recorded, %d were found", step.Step, step.Samples, len(samples))
	}
	folder := l.cfg.folder(of.Run)
	if absolute, err := filepath.Abs(folder); err == nil {
		folder = absolute
	}
	paths := map[uint32]string{}
	refs := make([]*bufferv1.SampleRef, len(samples))
	for i := range samples {
		a := &samples[i]
		refs[i] = of.SampleMessage(a)
		if a.Segment > 0 {
			if paths[a.Segment] == "" {
				paths[a.Segment] = segment.Path(folder, a.Segment)
			}
			refs[i].Segment = paths[a.Segment]
		}
	}
	return &bufferv1.Batch{
		RunId: of.Run, Step: step.Step, BatchId: step.Batch, Groups: step.Groups, Excluded: step.Excluded, Samples: refs,
		ZeroAdvantage: step.Zero, ZeroAdvantageReward: step.ZeroReward,
	}, nil
}
