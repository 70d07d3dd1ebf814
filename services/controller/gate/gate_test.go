package gate

import (
	"fmt"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

func config(when, action, best string) *configv1.RunConfig {
	c := &configv1.RunConfig{Snapshot: &configv1.SnapshotConfig{}}
	if when != "" {
		c.Gates = map[string]*configv1.GateConfig{"one": {When: proto.String(when), Action: proto.String(action)}}
	}
	if best != "" {
		c.Snapshot.Best = proto.String(best)
	}
	return c
}

func monitor(t *testing.T, c *configv1.RunConfig, stored []byte) *Monitor {
	t.Helper()
	m, err := New(c, stored)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// A gate fires at the first step after which its condition holds, and not again; a monitor that
// continues from the state of another one after any step gives the same.
func TestAGateFiresOnceAtItsStep(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		when   string
		values []float64
		step   uint64 // 0: never
	}{
		{"loss < 1", []float64{3, 1, 0.5, 0.2}, 3},
		{"loss < 0", []float64{3, 1, 0.5}, 0},
		{"no improvement of loss in 2 steps", []float64{3, 2, 2, 1, 1, 1.5, 1}, 6},
		{"no improvement of loss in 2 steps by 0.5", []float64{3, 2.9, 2.8, 1}, 3},
		{"no improvement of reward/mean in 3 steps", []float64{3, 2, 2, 4, 4, 4, 4}, 7},
	} {
		for stored := range len(c.values) + 1 {
			cfg := config(c.when, Stop, "")
			m, fired := monitor(t, cfg, nil), []uint64{}
			for i, value := range c.values {
				if i == stored {
					m = monitor(t, cfg, m.State())
				}
				for range 2 { // a recovery makes the step again
					for _, f := range m.ObserveStep(uint64(i+1), map[string]float64{"loss": value, "reward/mean": value}).Fired {
						fired = append(fired, f.Step)
					}
				}
			}
			want := []uint64{}
			if c.step > 0 {
				want = append(want, c.step)
			}
			if !slices.Equal(fired, want) {
				t.Errorf("%s: fired at %v, want %v", c.when, fired, want)
			}
			if halted := m.Halted(); (halted != nil) != (c.step > 0) || halted != nil && halted.Step != c.step {
				t.Errorf("%s: halted %+v", c.when, halted)
			}
		}
	}
}

// The evaluation before the first step fires nothing, but counts for improvement.
func TestTheFirstEvaluationIsABaseline(t *testing.T) {
	t.Parallel()
	metrics := func(value float64) map[string]float64 { return map[string]float64{"eval/reward": value} }
	m := monitor(t, config("eval/reward >= 0.5", Promote, "eval/reward"), nil)
	if seen := m.ObserveEvaluation(0, metrics(0.6), true); !seen.New || len(seen.Fired) > 0 || len(m.Snapshots(0)) > 0 {
		t.Errorf("at step 0: %+v, snapshots %v", seen, m.Snapshots(0))
	}
	if seen := m.ObserveEvaluation(2, metrics(0.55), false); len(seen.Fired) != 1 || !slices.Equal(m.Snapshots(2), []string{"gate-one"}) {
		t.Errorf("at step 2: %+v, snapshots %v", seen, m.Snapshots(2))
	}
	if seen := m.ObserveEvaluation(4, metrics(0.7), false); len(seen.Fired) != 0 || !slices.Equal(m.Snapshots(4), []string{Best}) {
		t.Errorf("at step 4: %+v, snapshots %v", seen, m.Snapshots(4))
	}
	if m.Halted() != nil {
		t.Errorf("a promotion halts the run: %+v", m.Halted())
	}
}

func TestAMissingMetricIsReportedOnce(t *testing.T) {
	t.Parallel()
	m := monitor(t, config("reward/brevity > 1", Stop, ""), nil)
	var reported []string
	for step := range uint64(30) {
		for _, name := range m.ObserveStep(step+1, map[string]float64{"loss": 1}).Missing {
			reported = append(reported, fmt.Sprint(step+1, name))
		}
	}
	if !slices.Equal(reported, []string{"10one"}) {
		t.Errorf("reported %v", reported)
	}
}

// A stop or a pause is in effect until the scheduler knows it.
func TestEnd(t *testing.T) {
	t.Parallel()
	cfg := config("loss < 1", Pause, "")
	m := monitor(t, cfg, nil)
	m.ObserveStep(1, map[string]float64{"loss": 0})
	if m = monitor(t, cfg, m.State()); m.Halted() == nil {
		t.Error("a restart forgets the pause")
	}
	m.End()
	if m = monitor(t, cfg, m.State()); m.Halted() != nil {
		t.Error("the pause is repeated")
	}
	if seen := m.ObserveStep(2, map[string]float64{"loss": 0}); len(seen.Fired) > 0 {
		t.Errorf("the gate fires again: %+v", seen)
	}
}
