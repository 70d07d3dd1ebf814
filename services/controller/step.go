package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

var tracer = otel.Tracer("github.com/rollout-rl/rollout/services/controller")

// errDrained reports that the drive stopped between two steps because it was asked to.
var errDrained = errors.New("drained")

// stepper makes the steps of a run with one learner.
type stepper struct {
	settings
	learner  *learner
	ledger   *ledger
	delivery *delivery
	due      *dueWork
	record   *record
	room     *room
	progress *progress
	events   *reporter
	vitals   *vitals
	gates    *gates
	now      func() time.Time
	draining <-chan struct{} // closed: stop between two steps

	committed time.Time // of the last step; zero if other work followed it
	delivered float64   // seconds that the last delivery took
}

// step makes one step: lease, train, commit, deliver, and the work that is due after it.
func (s *stepper) step(ctx context.Context, step uint64) error {
	ctx, span := tracer.Start(ctx, "step", trace.WithAttributes(attribute.String("run", s.runID), attribute.Int64("step", int64(step))))
	defer span.End()
	began := s.now()
	times := map[string]float64{"time/deliver": s.delivered}
	if s.committed.IsZero() {
		s.committed = began
	}

	s.progress.enter(leasing)
	err := s.room.waitForStep(ctx, s.delivery.newest, func(ctx context.Context) error {
		defer s.progress.enter(leasing)
		return s.due.snapshotter.join(ctx)
	})
	if err != nil {
		return err
	}
	batch, err := s.lease(ctx, step)
	if err != nil {
		return err
	}
	if len(batch.GetSamples()) == 0 {
		return fmt.Errorf("step %d: %w; `rollout logs tail %s --kind group.excluded` shows the reasons", step, ErrNothingLeft, s.runID)
	}
	times["time/lease"] = s.since(began)
	crashpoint.Here("controller/leased") // the batch is leased, the learner does not have it

	from := s.now()
	s.progress.enter(training)
	result, err := s.train(ctx, batch, times)
	if err != nil {
		return err
	}
	times["time/train"] = s.since(from)
	crashpoint.Here("controller/trained") // the step is made, not committed

	from = s.now()
	weights, err := s.published(ctx, result)
	if err != nil {
		return err
	}
	if weights != nil {
		// Workers load during the commit, so that sampling continues. The ledger accepts what they
		// sample with these weights once the commit has recorded them.
		s.delivery.announce(ctx, weights)
		crashpoint.Here("controller/announced") // workers may sample with the new weights, the step is not committed
	}
	s.progress.enter(committing)
	s.progress.waitFor(service("buffer", "buffer to commit the step"))
	if err := s.ledger.commit(ctx, batch, cmp.Or(result.GetWeightsDigest(), weights.GetDigest())); err != nil {
		return err
	}
	s.progress.committed(step)
	crashpoint.Here("controller/committed") // the step exists, no event is emitted
	times["time/commit"] = s.since(from)
	times["time/step"] = s.since(s.committed)
	s.committed = s.now()
	s.events.completions(batch, result)
	metrics := s.events.step(batch, result, times)
	if err := s.vitals.observe(ctx, step, metrics); err != nil {
		return err
	}
	if err := s.gates.observeStep(ctx, step, metrics); err != nil {
		return err
	}
	if weights != nil {
		if err := s.deliver(ctx, weights); err != nil {
			return err
		}
	}
	if s.record.save(ctx, true) {
		return errTaken
	}
	crashpoint.Here("controller/stored") // the store names the new weights
	done, err := s.due.after(ctx, step)
	if done {
		s.committed = time.Time{} // the time of that work is not part of the next step
	}
	return err
}

// lease waits for the batch of a step. errDrained if a drain was requested in the meantime.
func (s *stepper) lease(ctx context.Context, step uint64) (*bufferv1.Batch, error) {
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-s.draining:
			cancel()
		case <-waiting.Done():
		}
	}()
	for {
		got, err := s.ledger.lease(waiting, step)
		switch {
		case err != nil && ctx.Err() == nil && closed(s.draining):
			return nil, errDrained
		case err != nil:
			return nil, err
		case got.GetBatch() != nil:
			return got.GetBatch(), nil
		}
		if err := s.delivery.checkSource(); err != nil { // no worker can sample the missing groups
			return nil, err
		}
		s.progress.waitFor(got.GetWaits()...)
	}
}

// train has the learner make a step. At the same time it asks the workers how many calls of the
// reward they repeated while they sampled the batch, and adds the count to metrics.
func (s *stepper) train(ctx context.Context, batch *bufferv1.Batch, metrics map[string]float64) (*learnerv1.TrainResult, error) {
	repeated := make(chan uint64, 1)
	rewarded := s.cfg.GetReward() != nil
	if rewarded {
		go func() { repeated <- s.delivery.fleet.rewardRetries(ctx) }()
	}
	result, err := repeat(ctx, s.room, s.delivery.newest.GetBytes(), nextWeights, func() (*learnerv1.TrainResult, error) {
		return s.learner.train(ctx, batch, s.delivers(batch.GetStep()), s.progress)
	})
	if rewarded {
		metrics["reward/retries"] = float64(<-repeated)
	}
	return result, err
}

// published returns the weights that the learner published with a result; nil if no delivery is
// due.
func (s *stepper) published(ctx context.Context, result *learnerv1.TrainResult) (*weightsv1.WeightsManifest, error) {
	if !s.delivers(result.GetStep()) {
		return nil, nil
	}
	weights := result.GetWeights()
	if weights == nil {
		var err error
		if weights, err = s.learner.publish(ctx, s.room); err != nil {
			return nil, err
		}
	}
	if digest := result.GetWeightsDigest(); digest != "" && weights.GetDigest() != digest {
		return nil, fmt.Errorf("publish step %d: the learner trained %s and wrote %s: %w", result.GetStep(), result.GetWeightsDigest(), weights.GetDigest(), ErrDiverged)
	}
	weights.Lineage = s.delivery.lineage
	return weights, nil
}

// deliver delivers the weights of the step that was committed last.
func (s *stepper) deliver(ctx context.Context, weights *weightsv1.WeightsManifest) error {
	if err := s.delivery.deliver(ctx, weights); err != nil {
		return err
	}
	crashpoint.Here("controller/delivered") // the workers have the new weights, the store names the old ones
	s.delivered = s.since(s.committed)
	return nil
}

// since is the seconds since t.
func (s *stepper) since(t time.Time) float64 { return s.now().Sub(t).Seconds() }

// dueWork is the work that follows a committed step.
type dueWork struct {
	settings
	evaluator   *evaluator
	snapshotter *snapshotter
	gates       *gates
	learner     *learner
	ledger      *ledger
	delivery    *delivery
	room        *room
	progress    *progress
}

// after does the work that is due after a step, and reports whether there was any. It is
// idempotent.
func (d *dueWork) after(ctx context.Context, step uint64) (done bool, err error) {
	if d.evaluates(step) && d.gates.monitor.Restored(step) == nil { // else the weights of the step were evaluated before
		if err := d.settle(ctx, step); err != nil { // before the workers get other weights
			return true, err
		}
		metrics, err := d.evaluator.evaluate(ctx, step, false)
		if err != nil {
			return true, err
		}
		if err := d.gates.observeEvaluation(ctx, step, metrics, false); err != nil {
			return true, err
		}
		done = true
	}
	if err := d.gates.observeReserved(ctx, d.evaluator.reserved); err != nil {
		return done, err
	}
	if err := d.snapshotter.finish(ctx); err != nil {
		return done, err
	}
	restored, err := d.restore(ctx, step)
	if err != nil {
		return true, err
	}
	best, due := d.gates.monitor.Snapshots(step), !restored && (d.snapshots(step) || d.snapshotter.owed)
	if restored {
		best, done = nil, true
	}
	asked := d.snapshotter.cuts.first() != nil
	if !due && len(best) == 0 && !asked {
		return done, nil
	}
	if err := d.settle(ctx, step); err != nil {
		return true, err
	}
	if err := d.snapshotter.join(ctx); err != nil {
		return true, err
	}
	switch {
	case due && len(best) == 0 && !asked && !d.last(step) && !d.snapshotter.owed:
		return true, d.snapshotter.begin(ctx, step)
	case due:
		best = append([]string{periodic}, best...)
	}
	if len(best) > 0 {
		if err := d.snapshotter.take(ctx, step, best...); err != nil {
			return true, err
		}
	}
	_, err = d.snapshotter.cut(ctx, step)
	return true, err
}

// settle waits for the evaluation of an earlier step, and judges its result. A snapshot is not
// taken before, because a run that continues from it cannot make the weights of that step again.
func (d *dueWork) settle(ctx context.Context, step uint64) error {
	if err := d.evaluator.reserved.joinOther(ctx, step); err != nil {
		return err
	}
	return d.gates.observeReserved(ctx, d.evaluator.reserved)
}

// stepMetrics joins the learner's metrics of a step with the times that the controller measured.
func stepMetrics(result *learnerv1.TrainResult, times map[string]float64, samples int) map[string]float64 {
	all := maps.Clone(result.GetMetrics())
	if all == nil {
		all = map[string]float64{}
	}
	maps.Copy(all, times)
	all["samples"] = float64(samples)
	if seconds := times["time/step"]; seconds > 0 {
		all["samples_per_second"] = float64(samples) / seconds
		if tokens, ok := all["tokens"]; ok {
			all["tokens_per_second"] = tokens / seconds
		}
	}
	return all
}

// closed reports whether a channel that carries no values is closed.
func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
