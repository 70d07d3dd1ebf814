package scheduler

import (
	"context"
	"errors"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/proto/gen/names"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// backpressure pauses a run while the buffer cannot ingest, or the controller waits for space on
// the disk, and continues it afterwards. A run that was paused by request or by a refused gradient
// stays paused.
type backpressure struct{ *scope }

func (p *backpressure) serve(ctx context.Context) error {
	for {
		changed := p.board.Changes()
		if err := p.retry.Until(ctx, retry.Awaited{Owner: names.SchedulerService, What: "the record of the run (scheduler)"}, p.apply); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// apply does what the newest states of the ledger and the controller require.
func (p *backpressure) apply(ctx context.Context) (err error) {
	var stall *waitv1.Wait
	var reason string
	var state State
	var refused bool
	p.board.read(func(v *view) {
		stall, state, reason, refused = v.stall(), v.run.GetState(), v.run.GetReason(), refusal.Paused(v.run)
	})
	switch {
	case stall != nil && (state == Starting || state == Running):
		_, err = p.records.transition(ctx, p.run, Paused, func(r *Run) error {
			r.Reason, r.Message = stall.GetReason(), stall.GetEvidence()
			return nil
		})
	case stall == nil && state == Paused && reason != "" && !refused:
		_, err = p.records.transition(ctx, p.run, Starting, func(r *Run) error {
			if r.GetReason() == "" || refusal.Paused(r) { // paused by request or by a gradient in the meantime
				return ErrTransition
			}
			return clearReason(r)
		})
	}
	if errors.Is(err, ErrTransition) { // the state has changed in the meantime
		return nil
	}
	return err
}

// clearReason removes the reason of a pause.
func clearReason(r *Run) error {
	r.Reason, r.Message = "", ""
	return nil
}
