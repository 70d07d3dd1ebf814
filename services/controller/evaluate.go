package controller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// evaluator measures how well the newest weights do on held-out rows.
type evaluator struct {
	settings
	learner  *learner
	delivery *delivery
	progress *progress
	events   *reporter
	log      *slog.Logger
	retry    time.Duration // pause after every worker has failed
}

// evaluate evaluates the weights of a step and emits the result.
func (e *evaluator) evaluate(ctx context.Context, step uint64) error {
	e.progress.enter(evaluating, "")
	if e.evaluatesLoss() {
		return e.loss(ctx, step)
	}
	return e.completions(ctx, step)
}

// loss has the learner compute the loss of the held-out rows.
func (e *evaluator) loss(ctx context.Context, step uint64) error {
	e.progress.waitFor("%s to compute the loss of the held-out rows", e.learner.worker)
	got, err := e.learner.evaluateLoss(ctx, step)
	if err != nil {
		return err
	}
	e.events.loss(step, got)
	return nil
}

// completions has a worker complete the held-out prompts with the newest weights. If the worker
// fails, another one is asked. If all have failed, or no worker has the weights, it waits and
// starts over: a run does not skip evaluations.
func (e *evaluator) completions(ctx context.Context, step uint64) error {
	tried := map[*inferenceWorker]bool{}
	for {
		w, changed := e.delivery.fleet.pick(e.delivery.newest, tried)
		if w == nil {
			if err := e.delivery.checkSource(); err != nil {
				return err
			}
			e.progress.waitFor("an inference worker with weights version %d (scheduler restarts failed ones)", e.delivery.newest.GetVersion())
			if err := e.wait(ctx, changed, len(tried) > 0); err != nil {
				return err
			}
			clear(tried)
			continue
		}
		e.progress.waitFor("%s to complete the held-out prompts", w.name)
		samples, err := e.sample(ctx, w)
		if err == nil {
			e.events.evaluated(step, samples)
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if !transient(err) {
			return fmt.Errorf("evaluate step %d on %s: %w", step, w.name, err)
		}
		e.log.WarnContext(ctx, "an evaluation failed and is repeated", "step", step, "worker", w.name, "error", err)
		tried[w] = true
	}
}

// wait waits for a change of the fleet. If all workers failed, it also returns after a while.
func (e *evaluator) wait(ctx context.Context, changed <-chan struct{}, failed bool) error {
	var again <-chan time.Time
	if failed {
		timer := time.NewTimer(10 * e.retry)
		defer timer.Stop()
		again = timer.C
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-changed:
	case <-again:
	}
	return nil
}

// sample returns the samples of one worker, ordered by row.
func (e *evaluator) sample(ctx context.Context, w *inferenceWorker) ([]*inferencev1.EvalSample, error) {
	stream, err := w.client.Evaluate(ctx, &inferencev1.EvaluateRequest{
		RunId: e.runID, Version: e.delivery.newest.GetVersion(), MaxPrompts: e.cfg.GetEval().GetMaxPrompts(),
		Temperature: e.cfg.GetEval().GetTemperature(), Seed: e.cfg.GetSeed(),
	})
	if err != nil {
		return nil, err
	}
	var samples []*inferencev1.EvalSample
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			slices.SortStableFunc(samples, func(a, b *inferencev1.EvalSample) int { return int(int64(a.GetRow()) - int64(b.GetRow())) })
			return samples, nil
		}
		if err != nil {
			return nil, err
		}
		samples = append(samples, message.GetSamples()...)
	}
}

// score averages rewards and metrics over the samples that have a reward. Infrastructure failures
// are counted separately, never as a reward of 0.
func score(samples []*inferencev1.EvalSample) map[string]float64 {
	sums, counts := map[string]float64{}, map[string]float64{}
	failures := 0.0
	for _, s := range samples {
		if !scored(s) {
			failures++
			continue
		}
		sums["eval/reward"] += s.GetReward()
		counts["eval/reward"]++
		for name, value := range s.GetMetrics() {
			sums["eval/"+name] += value
			counts["eval/"+name]++
		}
	}
	out := map[string]float64{"eval/samples": float64(len(samples)), "eval/failed": failures}
	for name, sum := range sums {
		out[name] = sum / counts[name]
	}
	return out
}

// scored reports whether a sample has a reward.
func scored(s *inferencev1.EvalSample) bool {
	return s.GetOutcome() != trajectoryv1.Outcome_OUTCOME_INFRA_FAILED && s.GetOutcome() != trajectoryv1.Outcome_OUTCOME_ABORTED
}
