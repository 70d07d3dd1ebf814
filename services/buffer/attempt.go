package buffer

import (
	"context"
)

// begin opens an attempt that was not heard of.
func (a *admission) begin(ctx context.Context, g *Group, attempt uint32) error {
	if err := a.forget(ctx, g); err != nil {
		return err
	}
	g.Attempt = attempt
	a.touched = append(a.touched, g.Position)
	return a.ledger.move(g, Open, "")
}

func (a *admission) dissolve(ctx context.Context, g *Group, reason string) error {
	if err := a.forget(ctx, g); err != nil {
		return err
	}
	g.Failures++
	a.tally.Dissolved++
	a.touched = append(a.touched, g.Position)
	return a.ledger.move(g, Dissolved, reason)
}

// forget drops the samples of the attempt.
func (a *admission) forget(ctx context.Context, g *Group) error {
	stored := a.stored[g.Position]
	delete(a.stored, g.Position)
	delete(a.have, g.Position)
	delete(a.spreads, g.Position)
	delete(a.fresh, g.Position)
	if !stored {
		return nil
	}
	return a.tx.DropSamples(ctx, g.Position)
}
