package record

import (
	"context"
	"encoding/json"

	"github.com/rollout-rl/rollout/libs/completion"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Kept is the completions that were kept of a step.
type Kept struct {
	Step        uint64
	Completions []completion.Completion
}

// Completions calls told with what was kept of each step of a run, in order. A step that a recovery committed again is told of once.
func Completions(ctx context.Context, r Reader, runID string, told func(Kept) error) error {
	last := uint64(0)
	return Each(ctx, r, completions(runID), func(e *eventv1.Event) error {
		if e.GetStep() <= last {
			return nil
		}
		last = e.GetStep()
		return told(kept(e))
	})
}

// NewestCompletions is what was kept last; no completions where nothing was.
func NewestCompletions(ctx context.Context, r Reader, runID string) (Kept, error) {
	events, err := r.Events(ctx, completions(runID), 1, true)
	if err != nil || len(events) == 0 {
		return Kept{}, err
	}
	return kept(events[0]), nil
}

// FirstCompletions is what was kept first.
func FirstCompletions(ctx context.Context, r Reader, runID string) (Kept, error) {
	events, err := r.Events(ctx, completions(runID), 1, false)
	if err != nil || len(events) == 0 {
		return Kept{}, err
	}
	return kept(events[0]), nil
}

func completions(runID string) *storagev1.EventFilter {
	return &storagev1.EventFilter{RunId: runID, Kinds: []string{"completions"}}
}

func kept(e *eventv1.Event) Kept {
	k := Kept{Step: e.GetStep()}
	_ = json.Unmarshal([]byte(e.GetAttributes()["completions"]), &k.Completions) // without completions there are none to show
	return k
}
