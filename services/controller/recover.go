package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
)

// recovery brings a learner and the inference workers to the last committed step of a run.
type recovery struct {
	settings
	learner     *learner
	ledger      *ledger
	delivery    *delivery
	snapshotter *snapshotter
	evaluator   *evaluator
	due         *dueWork
	room        *room
	progress    *progress
	events      *reporter
	vitals      *vitals
	gates       *gates
	log         *slog.Logger
}

// reasonStep is the reason for which a learner refuses a call for another step than its own.
const reasonStep = "STEP_OUT_OF_TURN"

// recover does everything up to the last committed step, and returns that step. It begins again if
// the learner has made a step in the meantime: a request of an earlier controller was on its way.
func (r *recovery) recover(ctx context.Context) (uint64, error) {
	step, err := r.attempt(ctx)
	if rpcerr.Reason(err) != reasonStep {
		return step, err
	}
	r.log.WarnContext(ctx, "the learner made a step while its state was recovered; the recovery begins again", "error", err)
	return r.attempt(ctx)
}

func (r *recovery) attempt(ctx context.Context) (uint64, error) {
	last, err := r.ledger.newest(ctx)
	if err != nil {
		return 0, err
	}
	base, err := r.snapshotter.base(ctx)
	if err != nil {
		return 0, err
	}
	if last == nil {
		last = &bufferv1.StepRecord{Step: base}
	}
	r.progress.committed(last.GetStep())
	if err := r.vitals.halted(ctx); err != nil { // an earlier process did not deliver its report
		return 0, err
	}
	state, err := r.snapshotter.load(ctx)
	if err != nil {
		return 0, err
	}
	if err := r.snapshotter.overdue(ctx, base, last.GetStep()); err != nil {
		return 0, err
	}
	left := r.evaluator.reserved.left()
	if left != nil && state.GetStep() > left.Step { // the learner is past its weights
		if err := r.evaluator.reserved.repeat(ctx, left); err != nil {
			return 0, err
		}
		left = nil
	}
	if state.GetStep() > last.GetStep() { // trained, not committed: the learner will repeat its result
		return last.GetStep(), r.resume(ctx)
	}
	if last.GetStep() == base {
		return base, r.begin(ctx, base, state.GetWeightsDigest())
	}
	at, digest := state.GetStep(), state.GetWeightsDigest()
	made, err := r.ledger.step(ctx, at)
	if err != nil {
		return 0, err
	}
	if err := r.verify(ctx, made, digest); err != nil {
		return 0, err
	}
	if at == last.GetStep() && (r.vitals.behind(at) || r.gates.behind(at)) {
		if err := r.repeat(ctx, last); err != nil {
			return 0, err
		}
	}
	for ; at < last.GetStep(); at++ {
		if err := r.reevaluate(ctx, left, at); err != nil {
			return 0, err
		}
		if made, err = r.ledger.step(ctx, at+1); err != nil {
			return 0, err
		}
		if digest, err = r.retrain(ctx, made); err != nil {
			return 0, err
		}
	}
	if err := r.redeliver(ctx, last, digest); err != nil {
		return 0, err
	}
	_, err = r.due.after(ctx, at)
	return at, err
}

// begin records, delivers, and evaluates the weights that the run starts from.
func (r *recovery) begin(ctx context.Context, step uint64, digest string) error {
	if err := r.ledger.recordWeights(ctx, step, digest); err != nil {
		return err
	}
	crashpoint.Here("controller/recorded") // the initial digest is recorded, the weights are not written
	weights, err := r.learner.publish(ctx, r.room)
	if err != nil {
		return err
	}
	if err := r.delivery.deliver(ctx, weights); err != nil {
		return err
	}
	if r.cfg.GetEval().GetEverySteps() == 0 {
		return nil
	}
	metrics, err := r.evaluator.evaluate(ctx, step, true)
	if err != nil {
		return err
	}
	return r.gates.observeEvaluation(ctx, step, metrics, true)
}

// reevaluate starts the evaluation of a step that is made again.
func (r *recovery) reevaluate(ctx context.Context, left *pending, at uint64) error {
	if left == nil || left.Step != at {
		return nil
	}
	weights, err := r.learner.publish(ctx, r.room)
	if err != nil {
		return err
	}
	weights.Lineage = r.delivery.lineage
	return r.evaluator.reserved.start(ctx, at, weights, left.First)
}

// retrain trains on a recorded batch again, and returns the digest of the weights.
func (r *recovery) retrain(ctx context.Context, s *bufferv1.StepRecord) (string, error) {
	r.progress.waitFor(work(fmt.Sprintf("to train on the recorded batch of step %d again", s.GetStep()), r.learner.worker))
	batch, err := r.ledger.batch(ctx, s.GetStep())
	if err != nil {
		return "", err
	}
	result, err := repeat(ctx, r.room, 0, nextWeights, func() (*learnerv1.TrainResult, error) {
		return r.learner.train(ctx, batch, r.delivers(batch.GetStep()), r.progress)
	})
	if err != nil {
		return "", err
	}
	if err := r.verify(ctx, s, result.GetWeightsDigest()); err != nil {
		return "", err
	}
	// The process that committed the step may have died before it emitted the event.
	metrics := r.events.step(batch, result, map[string]float64{})
	if err := r.vitals.observe(ctx, s.GetStep(), metrics); err != nil {
		return "", err
	}
	return result.GetWeightsDigest(), r.gates.observeStep(ctx, s.GetStep(), metrics)
}

// repeat has a learner that made the last committed step report it again, because the process that
// committed it died before it stored what the health check and the gates made of it. A learner that
// loaded the step from a snapshot cannot.
func (r *recovery) repeat(ctx context.Context, last *bufferv1.StepRecord) error {
	_, err := r.retrain(ctx, last)
	if err == nil || ctx.Err() != nil || errors.Is(err, errLost) || errors.Is(err, errTaken) || refusal.Health(rpcerr.Reason(err)) {
		return err
	}
	r.log.WarnContext(ctx, "the health check and the gates lack the last step", "step", last.GetStep(), "error", err)
	return nil
}

// verify compares the digest of retrained weights with the record of the step; s is nil for a state
// that no step of this run made. A step whose weights were not digested has nothing to compare. If
// the run does not promise bits, other weights begin a new lineage.
func (r *recovery) verify(ctx context.Context, s *bufferv1.StepRecord, digest string) error {
	switch {
	case s == nil, digest == "", s.GetWeightsDigest() == "":
		return nil
	case !r.deterministic, r.gates.restored(s.GetStep(), digest):
		return r.lineage(ctx, s.GetStep(), digest)
	case s.GetWeightsDigest() != digest:
		return fmt.Errorf("step %d: recorded %s, retrained %s: %w", s.GetStep(), s.GetWeightsDigest(), digest, ErrDiverged)
	}
	return nil
}

// lineage records retrained weights of a committed step. The ledger compares them with the newest
// record of the version, which may be that of an earlier recovery.
func (r *recovery) lineage(ctx context.Context, version uint64, digest string) error {
	got, err := r.ledger.recordRetrained(ctx, version, digest)
	if err != nil {
		return err
	}
	r.delivery.lineage = got.GetLineage()
	if got.GetForked() && !r.gates.restored(version, digest) { // a gate reports what it restores
		r.events.forked(version, digest, got)
	}
	return nil
}

// resume delivers the newest weights again. Without a source workers wait for the next ones.
func (r *recovery) resume(ctx context.Context) error {
	if err := r.delivery.resume(ctx); !errors.Is(err, errNoSource) {
		return err
	}
	return nil
}

// redeliver delivers the weights of the last committed step, or the newest ones if the step
// published none. The learner publishes them again, even if their folder exists: another learner
// may have written it, and this one could not offer them to workers that can't open the folder.
func (r *recovery) redeliver(ctx context.Context, last *bufferv1.StepRecord, digest string) error {
	if last.GetWeightsDigest() == "" {
		err := r.delivery.resume(ctx)
		if !errors.Is(err, errNoSource) || !r.generates() || r.deterministic {
			return err
		}
		// The newest published weights are lost. The workers get those of the last step instead.
	}
	weights, err := r.learner.publish(ctx, r.room)
	if err != nil {
		return err
	}
	if !r.deterministic && weights.GetDigest() != digest {
		if err := r.lineage(ctx, weights.GetVersion(), weights.GetDigest()); err != nil {
			return err
		}
	}
	weights.Lineage = r.delivery.lineage
	return r.delivery.deliver(ctx, weights)
}
