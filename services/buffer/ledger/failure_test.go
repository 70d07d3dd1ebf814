package ledger

import (
	"fmt"
	"maps"
	"testing"

	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// Failures are counted by reason, and producers that invent reasons do not make the ledger grow.
func TestFailuresAreCountedByReason(t *testing.T) {
	t.Parallel()
	l := &Ledger{}
	for _, reason := range []string{"TOOL_FAILED", "", "TOOL_FAILED"} {
		l.fail(reason)
	}
	if want := map[string]uint64{"TOOL_FAILED": 2, "INFRA_FAILED": 1}; !maps.Equal(l.Failures, want) || l.InfraFailed != 3 {
		t.Errorf("got %v and %d, want %v and 3", l.Failures, l.InfraFailed, want)
	}
	for i := range 100 {
		l.fail(fmt.Sprintf("REASON_%d", i))
	}
	l.fail("TOOL_FAILED")
	if len(l.Failures) != failureReasons+1 || l.Failures[otherReason] != 38 || l.Failures["TOOL_FAILED"] != 3 || l.InfraFailed != 104 {
		t.Errorf("got %d reasons, %d of others, %d in all", len(l.Failures), l.Failures[otherReason], l.InfraFailed)
	}
}

// The times of a sample take at most TimesBytes of its row.
func TestTimesAreBounded(t *testing.T) {
	t.Parallel()
	times := &trajectoryv1.EpisodeTimes{BeganUnixMs: 1, Turns: []*trajectoryv1.TurnTimes{{AskedMs: 1}}}
	if raw := timesOf(&trajectoryv1.TrajectoryHeader{Times: times}); len(raw) == 0 {
		t.Error("the times were not stored")
	}
	for range 1000 {
		times.Turns = append(times.Turns, &trajectoryv1.TurnTimes{AskedMs: 1 << 31})
	}
	if raw := timesOf(&trajectoryv1.TrajectoryHeader{Times: times}); raw != nil {
		t.Errorf("%d bytes were stored", len(raw))
	}
	if raw := timesOf(&trajectoryv1.TrajectoryHeader{}); raw != nil {
		t.Errorf("a sample without times has %d bytes", len(raw))
	}
}
