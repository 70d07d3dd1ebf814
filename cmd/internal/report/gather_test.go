package report

import (
	"context"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/cmd/internal/record"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// warned is a run with warnings.
type warned struct {
	record.Reader
	warnings []*eventv1.Event
}

func (w warned) Run(context.Context, string) (*runv1.RunStatus, error) {
	return &runv1.RunStatus{Run: &runv1.Run{RunId: "run-01", Name: "addition"}}, nil
}

func (w warned) Metrics(context.Context, string, func(*storagev1.Series)) error { return nil }

func (w warned) Events(_ context.Context, f *storagev1.EventFilter, _ int, _ bool) ([]*eventv1.Event, error) {
	if f.GetMinLevel() == eventv1.Level_LEVEL_WARN {
		return w.warnings, nil
	}
	return nil, nil
}

func TestAReportNamesCollapses(t *testing.T) {
	t.Parallel()
	d, err := Gather(t.Context(), warned{warnings: []*eventv1.Event{
		{Kind: "health.collapse", Level: eventv1.Level_LEVEL_WARN, Service: "learner-controller", Message: "the reward collapsed"},
		{Kind: "run.state", Level: eventv1.Level_LEVEL_ERROR, Service: "scheduler", Message: "run is FAILED"},
	}}, "addition")
	if err != nil {
		t.Fatal(err)
	}
	if notes := strings.Join(d.notes(), "\n"); !strings.Contains(notes, "learner-controller: the reward collapsed") || strings.Contains(notes, "run is FAILED") {
		t.Errorf("notes: %s", notes)
	}
}
