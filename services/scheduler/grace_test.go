package scheduler

import (
	"strings"
	"testing"
	"time"

	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Requests of people get time to finish; the work of other workers is repeated.
func TestInferenceWorkersGetTimeToFinishRequests(t *testing.T) {
	t.Parallel()
	for given, want := range map[time.Duration]time.Duration{0: 12 * time.Second, time.Second: time.Second} {
		cfg := Config{}
		cfg.Worker.Limits.StopGrace = given
		run := &runv1.Run{RunId: "run-1"}
		deps := Deps{Now: time.Now}
		for _, sup := range newConductor(newConductors(cfg, deps, newRecords(deps)), run, nil).supervision.supervisors(run, supervised(run)) {
			want := want
			if !strings.HasPrefix(sup.Worker, "inference") {
				want = given
			}
			if got := sup.Limits.StopGrace; got != want {
				t.Errorf("%s gets %v, want %v", sup.Worker, got, want)
			}
		}
	}
}
