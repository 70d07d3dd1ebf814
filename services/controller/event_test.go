package controller

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
)

// warnings collects the warnings among the emitted events.
type warnings []*eventv1.Event

func (w *warnings) Emit(e *eventv1.Event) {
	if e.GetLevel() == eventv1.Level_LEVEL_WARN {
		*w = append(*w, e)
	}
}

func (w *warnings) Flush(context.Context) error { return nil }

// Consecutive steps without a gradient give a warning at 3 and at 30 steps. A step with a gradient
// resets the count.
func TestStepsWithoutAGradientGiveWarnings(t *testing.T) {
	t.Parallel()
	var events warnings
	r := &reporter{settings: settings{runID: run}, bus: &events, now: time.Now}
	step := uint64(0)
	make := func(n int, share float64) {
		for range n {
			step++
			r.step(&bufferv1.Batch{Step: step}, &learnerv1.TrainResult{Metrics: map[string]float64{"zero_advantage_groups": share, "reward/mean": 0, "reward/std": 0}}, nil)
		}
	}
	make(2, 1)
	make(1, 0.97)
	make(2, 1)
	if len(events) != 0 {
		t.Fatalf("warned too early: %v", events)
	}
	make(1, 1)
	if len(events) != 1 || events[0].GetLevel() != eventv1.Level_LEVEL_WARN || events[0].GetStep() != 6 ||
		!strings.Contains(events[0].GetMessage(), "the last 3 steps had no gradient") || !strings.Contains(events[0].GetMessage(), "all of them were 0") ||
		!strings.Contains(events[0].GetMessage(), "partial credit") {
		t.Fatalf("warnings %v", events)
	}
	make(26, 1)
	if len(events) != 1 {
		t.Fatalf("%d warnings", len(events))
	}
	make(1, 1)
	if len(events) != 2 || !strings.Contains(events[1].GetMessage(), "the last 30 steps") {
		t.Fatalf("warnings %v", events)
	}
	r.step(&bufferv1.Batch{Step: step}, &learnerv1.TrainResult{Metrics: map[string]float64{"loss": 1}}, nil) // supervised: without groups
	if r.flat.steps != 0 || len(events) != 2 {
		t.Error("steps without groups were counted")
	}
}

type counting struct {
	inferencev1.InferenceWorkerServiceClient
	retries uint64
}

func (c *counting) GetInferenceStatus(context.Context, *inferencev1.GetInferenceStatusRequest, ...grpc.CallOption) (*inferencev1.GetInferenceStatusResponse, error) {
	return &inferencev1.GetInferenceStatusResponse{RewardRetries: c.retries}, nil
}

// Each repeated call of the reward is counted once, over all workers. A restarted worker counts
// from 0.
func TestRewardRetriesAreCountedOnce(t *testing.T) {
	t.Parallel()
	one, two := &counting{retries: 2}, &counting{}
	f := newFleet(settings{runID: run, incarnation: 1}, nil, time.Second, nil)
	f.workers["one"], f.workers["two"] = &inferenceWorker{client: one}, &inferenceWorker{client: two}
	for i, want := range []uint64{2, 0, 4} {
		if i == 2 {
			one.retries, two.retries = 5, 1
		}
		if got := f.rewardRetries(t.Context()); got != want {
			t.Errorf("query %d: %d repeated calls, want %d", i, got, want)
		}
	}
	f.workers["one"] = &inferenceWorker{client: &counting{retries: 1}} // a new process
	if got := f.rewardRetries(t.Context()); got != 1 {
		t.Errorf("%d repeated calls of the new process, want 1", got)
	}
}
