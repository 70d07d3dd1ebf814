package scheduler

import (
	"strings"
	"testing"
	"time"

	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// A worker that answers people gets the time to end what it began; the others' work is made again.
func TestInferenceWorkersGetTimeForRequestsInHand(t *testing.T) {
	t.Parallel()
	for given, want := range map[time.Duration]time.Duration{0: 12 * time.Second, time.Second: time.Second} {
		s := &service{Deps: Deps{Now: time.Now}}
		s.cfg.Worker.Limits.StopGrace = given
		run := &runv1.Run{RunId: "run-1"}
		for _, sup := range newConductor(s, run).supervisors(run) {
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
