package controller

import (
	"context"
	"fmt"
	"os"

	"github.com/rollout-rl/rollout/services/controller/gate"
)

// restore continues from the newest best snapshot if a gate demands it, and reports whether the
// weights of the step are restored ones. The state of the snapshot becomes that of the step: the
// ledger records its weights as the version of the step, in a new lineage, and a snapshot has its
// state, so that a recovery does not make the replaced weights again.
//
// What is restored is stored first. From then on everything can be repeated, with the learner in
// either state.
func (d *dueWork) restore(ctx context.Context, step uint64) (bool, error) {
	fired := d.gates.monitor.Restoring()
	if len(fired) == 0 {
		return d.gates.monitor.Restored(step) != nil, nil
	}
	r := fired[0].Restore
	if r == nil {
		if err := d.join(ctx); err != nil {
			return false, err
		}
		if names := d.gates.monitor.Snapshots(step); len(names) > 0 { // of the weights that are replaced
			if err := d.snapshotter.take(ctx, step, names...); err != nil {
				return false, err
			}
		}
		var err error
		if r, err = d.choose(ctx, step); err != nil {
			return false, err
		}
		if err := d.gates.setRestore(ctx, *r); err != nil {
			return false, err
		}
	}
	if r.Snapshot != "" {
		if err := d.replace(ctx, *r); err != nil {
			return false, err
		}
	}
	done := *r
	done.Done = true
	if err := d.gates.setRestore(ctx, done); err != nil {
		return false, err
	}
	d.gates.repeat(step)
	return r.Snapshot != "", nil
}

// join waits for a snapshot that is being written, and for all evaluations by reserved workers:
// they need the weights that are replaced.
func (d *dueWork) join(ctx context.Context) error {
	if err := d.snapshotter.join(ctx); err != nil {
		return err
	}
	if err := d.evaluator.reserved.join(ctx); err != nil {
		return err
	}
	return d.gates.observeReserved(ctx, d.evaluator.reserved)
}

// choose decides what is restored after a step.
func (d *dueWork) choose(ctx context.Context, step uint64) (*gate.Restore, error) {
	best, err := d.snapshotter.best(ctx)
	switch {
	case err != nil:
		return nil, err
	case best == nil:
		return &gate.Restore{Step: step, Why: fmt.Sprintf("no step has improved %s, so that the run has no best snapshot", d.cfg.GetSnapshot().GetBest())}, nil
	case best.GetStep() == step:
		return &gate.Restore{Step: step, Why: "the step itself is the best one"}, nil
	}
	return &gate.Restore{Step: step, Snapshot: best.GetSnapshotId(), From: best.GetStep(), Digest: best.GetWeightsDigest()}, nil
}

// replace makes the state of a snapshot the one after a committed step.
func (d *dueWork) replace(ctx context.Context, r gate.Restore) error {
	from, err := d.snapshotter.get(ctx, r.Snapshot)
	if err != nil {
		return err
	}
	dir, err := d.snapshotter.copy(ctx, from)
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	d.progress.waitFor(work(fmt.Sprintf("to restore the state of step %d", r.From), d.learner.worker))
	state, err := d.learner.replace(ctx, r.Step, dir)
	if err != nil {
		return err
	}
	if state.GetWeightsDigest() != r.Digest {
		return fmt.Errorf("restore snapshot %s: it has the weights %s, and the learner loaded %s: %w", r.Snapshot, r.Digest, state.GetWeightsDigest(), ErrDiverged)
	}
	if err := d.snapshotter.take(ctx, r.Step, periodic); err != nil {
		return err
	}
	recorded, err := d.ledger.recordRetrained(ctx, r.Step, r.Digest)
	if err != nil {
		return err
	}
	d.delivery.lineage = recorded.GetLineage()
	weights, err := d.learner.publish(ctx, d.room)
	if err != nil {
		return err
	}
	weights.Lineage = d.delivery.lineage
	return d.delivery.deliver(ctx, weights)
}
