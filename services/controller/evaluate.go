package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"
	"time"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// evaluator measures how well the newest weights do on held-out rows.
type evaluator struct {
	settings
	learner  *learner
	delivery *delivery
	reserved *reserved // nil without reserved workers
	progress *progress
	events   *reporter
	record   *record
	log      *slog.Logger
	retry    time.Duration // pause after every worker has failed
	limit    drainLimit
}

// evaluate evaluates the weights of a step, emits the result, and returns it; nil if reserved
// workers evaluate in the background. first: the run starts from these weights.
func (e *evaluator) evaluate(ctx context.Context, step uint64, first bool) (map[string]float64, error) {
	e.progress.enter(evaluating)
	if e.evaluatesLoss() {
		return e.loss(ctx, step)
	}
	limited, end := e.limit.with(ctx)
	defer end()
	out, err := e.completions(limited, step, first)
	return out, e.limit.ended(limited, err)
}

// loss has the learner compute the loss of the held-out rows.
func (e *evaluator) loss(ctx context.Context, step uint64) (map[string]float64, error) {
	e.progress.waitFor(work("to compute the loss of the held-out rows", e.learner.worker))
	got, err := e.learner.evaluateLoss(ctx, step)
	if err != nil {
		return nil, err
	}
	return e.events.loss(step, got), nil
}

// completions has workers complete the held-out prompts with the newest weights: reserved workers
// in the background, or else one of the others while the drive waits.
func (e *evaluator) completions(ctx context.Context, step uint64, first bool) (map[string]float64, error) {
	if e.reserved != nil {
		if err := e.reserved.start(ctx, step, e.delivery.newest, first); err != nil {
			return nil, err
		}
		if e.record.save(ctx, true) { // before the next step, so that a restarted controller repeats the evaluation
			return nil, errTaken
		}
		return nil, nil
	}
	s := e.sampling(e.delivery.fleet, e.delivery.newest, e.delivery.checkSource)
	var all []answers
	for _, suite := range e.evaluatedSuites() {
		samples, err := s.part(ctx, suite, nil, 0, 1)
		if err != nil {
			return nil, fmt.Errorf("evaluate step %d: %w", step, err)
		}
		all = append(all, answers{suite, samples})
	}
	return e.events.evaluated(step, e.delivery.newest, all), nil
}

func (e *evaluator) sampling(f *fleet, m *weightsv1.WeightsManifest, source func() error) *evalSampling {
	return &evalSampling{settings: e.settings, fleet: f, weights: m, checkSource: source, waitFor: e.progress.waitFor, log: e.log, retry: e.retry}
}

// evalSampling completes the prompts of suites with one version.
type evalSampling struct {
	settings
	fleet       *fleet
	weights     *weightsv1.WeightsManifest
	checkSource func() error
	waitFor     func(...*waitv1.Wait)
	log         *slog.Logger
	retry       time.Duration // pause after every worker has failed
}

// part returns the samples of one part of the rows of a suite. If a worker fails, another one is
// asked. If all have failed, or no worker has the weights, it waits and starts over: a run does not
// skip evaluations. first: the worker to ask first; nil: any.
func (s *evalSampling) part(ctx context.Context, suite string, first *inferenceWorker, part, parts uint32) ([]*inferencev1.EvalSample, error) {
	tried := map[*inferenceWorker]bool{}
	for {
		w, changed := s.fleet.pick(s.weights, tried)
		if first != nil {
			w, first = first, nil
		}
		if w == nil {
			if err := s.checkSource(); err != nil {
				return nil, err
			}
			s.waitFor(service("scheduler", fmt.Sprintf("an inference worker with weights version %d (scheduler restarts failed ones)", s.weights.GetVersion())))
			if err := s.wait(ctx, changed, len(tried) > 0); err != nil {
				return nil, err
			}
			clear(tried)
			continue
		}
		s.waitFor(work("to complete "+promptsOf(suite), w.name))
		request := s.request(suite)
		request.Version, request.Part, request.Parts = s.weights.GetVersion(), part, parts
		samples, err := s.sample(ctx, w, request)
		if err == nil {
			return samples, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if !transient(err) {
			return nil, fmt.Errorf("on %s: %w", w.name, err)
		}
		s.log.WarnContext(ctx, "an evaluation failed and is repeated", "version", s.weights.GetVersion(), "worker", w.name, "error", err)
		tried[w] = true
	}
}

// wait waits for a change of the fleet. If all workers failed, it also returns after a while.
func (s *evalSampling) wait(ctx context.Context, changed <-chan struct{}, failed bool) error {
	var again <-chan time.Time
	if failed {
		timer := time.NewTimer(10 * s.retry)
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
func (s *evalSampling) sample(ctx context.Context, w *inferenceWorker, request *inferencev1.EvaluateRequest) ([]*inferencev1.EvalSample, error) {
	stream, err := w.client.Evaluate(ctx, request)
	if err != nil {
		return nil, err
	}
	var samples []*inferencev1.EvalSample
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			sortByRow(samples)
			return samples, nil
		}
		if err != nil {
			return nil, err
		}
		samples = append(samples, message.GetSamples()...)
	}
}

func sortByRow(samples []*inferencev1.EvalSample) {
	slices.SortStableFunc(samples, func(a, b *inferencev1.EvalSample) int {
		return cmp.Or(cmp.Compare(a.GetRow(), b.GetRow()), cmp.Compare(a.GetSample(), b.GetSample()))
	})
}

// score averages rewards and metrics over the samples that have a reward, with the standard error
// of the mean reward. Infrastructure failures are counted separately, never as a reward of 0.
func score(samples []*inferencev1.EvalSample) map[string]float64 {
	sums, counts := map[string]float64{}, map[string]float64{}
	failures, squares := 0.0, 0.0
	for _, s := range samples {
		if !scored(s) {
			failures++
			continue
		}
		sums["eval/reward"] += s.GetReward()
		squares += s.GetReward() * s.GetReward()
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
	if n := counts["eval/reward"]; n > 1 {
		mean := out["eval/reward"]
		out["eval/reward_stderr"] = math.Sqrt(max(0, squares/n-mean*mean) / (n - 1))
	}
	return out
}

// scored reports whether a sample has a reward.
func scored(s *inferencev1.EvalSample) bool {
	return s.GetOutcome() != trajectoryv1.Outcome_OUTCOME_INFRA_FAILED && s.GetOutcome() != trajectoryv1.Outcome_OUTCOME_ABORTED
}
