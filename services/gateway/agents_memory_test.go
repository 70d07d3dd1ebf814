package gateway

import (
	"slices"
	"testing"
	"time"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// A run that has ended takes no memory, unless agents ask for its prompts or have some.
func TestAnEndedRunIsReleased(t *testing.T) {
	t.Parallel()
	a := &agents{now: time.Now, known: map[string]*agentRun{}}
	kind := "external"
	config := &configv1.RunConfig{Environment: &configv1.EnvironmentConfig{Kind: &kind}}
	open := func(id string, asking int) *agentRun {
		t.Helper()
		run, err := a.open(&runv1.Run{RunId: id, Plan: &planv1.Plan{Config: config}}, asking)
		if err != nil {
			t.Fatal(err)
		}
		return run
	}
	open("asks", 1)
	open("has", 0).held["group"] = []*workItem{{}}
	open("idle", 0)
	open("asked", 1).ask(-1, time.Now())
	open("deleted", 1)
	for _, run := range a.all() {
		a.forget(run)
	}
	a.deleted("deleted")
	var left []string
	for _, run := range a.all() {
		left = append(left, run.id)
	}
	slices.Sort(left)
	if !slices.Equal(left, []string{"asks", "has"}) {
		t.Errorf("the runs %v are kept", left)
	}
}
