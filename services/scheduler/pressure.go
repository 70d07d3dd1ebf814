package scheduler

import (
	"context"
	"errors"

	"github.com/rollout-rl/rollout/libs/refusal"
)

// pressure pauses the run while the buffer ingests nothing, and lets it go on when that is over. What was paused by request
// or by a refused gradient stays so.
func (c *conductor) pressure(ctx context.Context) error {
	for {
		woken := c.changes()
		if err := c.insist(ctx, "the record of the run (scheduler)", c.relieve); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-woken:
		}
	}
}

// relieve does what the newest ledger state asks for.
func (c *conductor) relieve(ctx context.Context) (err error) {
	c.mu.Lock()
	stalled, why := c.view.ledger.GetStalledReason(), c.view.ledger.GetStalledMessage()
	state, reason, refused := c.view.run.GetState(), c.view.run.GetReason(), refusal.Paused(c.view.run)
	c.mu.Unlock()
	switch {
	case stalled != "" && (state == Starting || state == Running):
		_, err = c.svc.transition(ctx, c.id, Paused, func(r *Run) error {
			r.Reason, r.Message = stalled, why
			return nil
		})
	case stalled == "" && state == Paused && reason != "" && !refused:
		_, err = c.svc.transition(ctx, c.id, Starting, func(r *Run) error {
			if r.GetReason() == "" || refusal.Paused(r) { // by request, or by a gradient, meanwhile
				return ErrTransition
			}
			return unreason(r)
		})
	}
	if errors.Is(err, ErrTransition) { // somebody else was first
		return nil
	}
	return err
}

// unreason takes off why a run was paused.
func unreason(r *Run) error {
	r.Reason, r.Message = "", ""
	return nil
}
