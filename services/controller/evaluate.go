package controller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// evaluate says how well the newest weights do on held-out rows.
func (d *drive) evaluate(ctx context.Context, l *learner, step uint64) error {
	d.enter(evaluating, "")
	if d.set.teachesHeldOut() {
		return d.evaluateLoss(ctx, l, step)
	}
	return d.evaluateAnswers(ctx, step)
}

// evaluateLoss has the learner compute the loss of held-out rows.
func (d *drive) evaluateLoss(ctx context.Context, l *learner, step uint64) error {
	d.waiting("%s to compute the loss of the held-out rows", l.worker)
	got, err := ask(ctx, l, func(ctx context.Context) (*learnerv1.EvaluateLossResponse, error) {
		return l.client.EvaluateLoss(ctx, &learnerv1.EvaluateLossRequest{RunId: d.spec.GetRunId(), Step: step})
	})
	if err != nil {
		return fmt.Errorf("evaluate step %d: %w", step, err)
	}
	d.emitLoss(step, got)
	return nil
}

// evaluateAnswers asks a worker that holds the newest weights for the held-out answers. A worker that fails is replaced by
// another; after a worker each has failed, or none came, it tries anew: evaluation is part of the run, not a side show.
func (d *drive) evaluateAnswers(ctx context.Context, step uint64) error {
	tried := map[*member]bool{}
	for {
		m, changed := d.fleet.holder(d.weights, tried)
		if m == nil {
			if err := d.fleet.lost(d.weights); err != nil {
				return err
			}
			d.waiting("an inference worker with weights version %d (scheduler restarts failed ones)", d.weights.GetVersion())
			if err := d.pause(ctx, changed, len(tried) > 0); err != nil {
				return err
			}
			clear(tried)
			continue
		}
		d.waiting("%s to answer the held-out prompts", m.worker)
		samples, err := d.answers(ctx, m)
		if err == nil {
			d.emitEval(step, samples)
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if !transient(err) {
			return fmt.Errorf("evaluate step %d on %s: %w", step, m.worker, err)
		}
		d.log.WarnContext(ctx, "an evaluation failed and is tried again", "step", step, "worker", m.worker, "error", err)
		tried[m] = true
	}
}

// pause waits for a change of the fleet, or where workers are there that failed, a moment.
func (d *drive) pause(ctx context.Context, changed <-chan struct{}, failed bool) error {
	var again <-chan time.Time
	if failed {
		timer := time.NewTimer(10 * d.cfg.Retry)
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

func (d *drive) answers(ctx context.Context, m *member) ([]*inferencev1.EvalSample, error) {
	stream, err := m.client.Evaluate(ctx, &inferencev1.EvaluateRequest{
		RunId: d.spec.GetRunId(), Version: d.weights.GetVersion(), MaxPrompts: d.set.cfg.GetEval().GetMaxPrompts(),
		Temperature: d.set.cfg.GetEval().GetTemperature(), Seed: d.set.cfg.GetSeed(),
	})
	if err != nil {
		return nil, err
	}
	var samples []*inferencev1.EvalSample
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			slices.SortStableFunc(samples, func(a, b *inferencev1.EvalSample) int { return int(int64(a.GetRow()) - int64(b.GetRow())) })
			return samples, nil
		}
		if err != nil {
			return nil, err
		}
		samples = append(samples, piece.GetSamples()...)
	}
}

// score averages rewards and further numbers over the samples that were scored; failures of infrastructure are counted
// beside, never as a reward of 0.
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
