package buffer_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
)

// drawing is the config of a ledger whose steps of 2 groups may go through 6 groups each.
func drawing() *bufferv1.LedgerConfig {
	c := ledgerConfig()
	c.DrawBatches, c.Partial, c.MaxStaleness = 3, true, 9
	return c
}

// flat is a group whose samples all have the same reward.
func flat(position uint64, reward float64) []*trajectoryv1.TrajectoryEnvelope {
	group := groupOf(position, 0, 0)
	for i, e := range group {
		e.Header.Reward = reward
		group[i] = seal(e.Header)
	}
	return group
}

func (s *bench) excluded(n uint64) {
	s.Helper()
	s.until(fmt.Sprintf("%d excluded groups", n), func(l *bufferv1.LedgerState) bool { return l.GetExcluded() == n })
}

func TestAStepSkipsGroupsWithEqualRewards(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(drawing())
	s.record(0)
	s.publish(flat(1, 0)...)
	s.publish(groupOf(3, 0, 0)...) // before earlier positions
	s.excluded(1)
	s.samples(2 * size)
	if w := s.waiting(1); w != "2 of 2 groups of step 1 (inference workers), 1 excluded so far" {
		t.Errorf("waits for %q", w)
	}
	s.publish(flat(2, 1)[:3]...)
	s.publish(flat(2, 1)[3:]...) // the last sample decides, in whichever message it is
	s.excluded(2)
	equal := "; groups whose rewards differ: in 2 of the 3 groups drawn for step 1 all rewards were equal (dynamic sampling, which may draw 6)"
	if w := s.waiting(1); w != "1 of 2 groups of step 1 (inference workers), 2 excluded so far"+equal {
		t.Errorf("waits for %q", w)
	}
	s.publish(groupOf(0, 0, 0)...)
	b := s.lease(1)
	if got := positions(t, b); !reflect.DeepEqual(got, []uint64{0, 3}) || b.GetExcluded() != 2 || b.GetZeroAdvantage() != 2 || b.GetZeroAdvantageReward() != 0.5 {
		t.Errorf("batch of %v, %v", got, b)
	}
	if again := s.lease(1); !proto.Equal(again, b) {
		t.Errorf("leased again: %v", again)
	}
	record := s.commit(b)
	if record.GetEndPosition() != 4 || record.GetZeroAdvantage() != 2 {
		t.Errorf("step %v", record)
	}
	l := s.until("step 1", func(l *bufferv1.LedgerState) bool { return l.GetStep() == 1 })
	if l.GetExcluded() != 2 || l.GetSkipped() != 2 || l.GetConsumed() != 2 {
		t.Errorf("%v", l)
	}
	s.restart()
	s.publish(append(groupOf(4, 0, 0), groupOf(5, 0, 0)...)...)
	if got := positions(t, s.lease(2)); !reflect.DeepEqual(got, []uint64{4, 5}) {
		t.Errorf("the next step takes %v", got)
	}
}

// A sample that is left out has no reward, whether its weights are known when it arrives or later.
func TestASampleThatIsLeftOutHasNoReward(t *testing.T) {
	t.Parallel()
	s := setup(t)
	config := drawing()
	config.MinGroupSize = 3
	s.open(config)
	s.record(0)
	for version := range uint64(2) {
		group := flat(version, 1)
		leftOut(group[2])
		group[2].Header.Reward = 0
		for _, e := range group {
			ofVersion(e, version)
		}
		s.publish(group...)
		s.samples((version + 1) * size)
	}
	s.record(1)
	s.excluded(2)
	s.publish(append(groupOf(2, 0, 0), groupOf(3, 0, 0)...)...)
	if b := s.lease(1); b.GetZeroAdvantage() != 2 || b.GetZeroAdvantageReward() != 1 {
		t.Errorf("%d groups with equal rewards, mean %v", b.GetZeroAdvantage(), b.GetZeroAdvantageReward())
	}
}

func TestByCompletionLeftoverGroupsStayForTheNextStep(t *testing.T) {
	t.Parallel()
	s := setup(t)
	c := drawing()
	c.Order = bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION
	s.open(c)
	s.record(0)
	for n, group := range [][]*trajectoryv1.TrajectoryEnvelope{groupOf(4, 0, 0), flat(0, 1), groupOf(2, 0, 0), flat(1, 0), groupOf(3, 0, 0)} {
		s.publish(group...)
		s.samples(uint64(n+1) * size)
	}
	s.restart()
	b := s.lease(1)
	if got := positions(t, b); !reflect.DeepEqual(got, []uint64{2, 4}) || b.GetZeroAdvantage() != 1 || b.GetZeroAdvantageReward() != 1 {
		t.Errorf("batch of %v: %v", got, b)
	}
	if r := s.commit(b); r.GetEndPosition() != 3 {
		t.Errorf("step 1 used up %d positions", r.GetEndPosition())
	}
	s.publish(groupOf(5, 0, 0)...)
	b = s.lease(2)
	if got := positions(t, b); !reflect.DeepEqual(got, []uint64{3, 5}) || b.GetExcluded() != 1 {
		t.Errorf("the next step takes %v: %v", got, b)
	}
}

// A step that is full without its stale groups dissolves them, and their rows say so.
func TestAFullStepDissolvesStaleGroups(t *testing.T) {
	t.Parallel()
	s := setup(t)
	c := drawing()
	c.Order, c.MaxStaleness = bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION, 1
	s.open(c)
	s.record(0)
	s.publish(slices.Concat(groupOf(0, 0, 0), groupOf(1, 0, 0), groupOf(2, 0, 0), groupOf(3, 0, 0), groupOf(4, 0, 0))...)
	s.samples(5 * size)
	s.commit(s.lease(1))
	s.commit(s.lease(2))
	s.publish(slices.Concat(groupOf(5, 0, 2), groupOf(6, 0, 2))...)
	s.samples(7 * size)
	if got := positions(t, s.lease(3)); !reflect.DeepEqual(got, []uint64{5, 6}) {
		t.Errorf("%v", got)
	}
	l := s.until("the lease", func(l *bufferv1.LedgerState) bool { return l.GetLeased() == 2 })
	if len(l.GetDissolved()) != 1 || l.GetDissolved()[0].GetPosition() != 4 || l.GetReady() != 0 {
		t.Errorf("%v", l)
	}
}

func TestAnExhaustedStepTakesTheGroupsItHasOrIsRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		partial bool
		good    []uint64
		groups  uint32
		reason  string
	}{
		"on what there is": {true, []uint64{3}, 1, ""},
		"refused":          {false, []uint64{3}, 0, "DYNAMIC_SAMPLING_EXHAUSTED"},
		"nothing there":    {true, nil, 0, "DYNAMIC_SAMPLING_EXHAUSTED"},
		"just enough":      {false, []uint64{0, 5}, 2, ""},
	} {
		for _, order := range []bufferv1.LeaseOrder{bufferv1.LeaseOrder_LEASE_ORDER_POSITION, bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION} {
			t.Run(fmt.Sprint(name, order), func(t *testing.T) {
				t.Parallel()
				s := setup(t)
				config := drawing()
				config.Partial, config.Order = c.partial, order
				s.open(config)
				s.record(0)
				for p := range uint64(6) {
					if slices.Contains(c.good, p) {
						s.publish(groupOf(p, 0, 0)...)
					} else {
						s.publish(flat(p, 1)...)
					}
				}
				r, err := s.client.LeaseBatch(t.Context(), &bufferv1.LeaseBatchRequest{RunId: run, Step: 1, WaitSeconds: 20})
				if rpcerr.Reason(err) != c.reason || r.GetBatch().GetGroups() != c.groups {
					t.Fatalf("%v, %v", r, err)
				}
				if err == nil && r.GetBatch().GetGroups()+r.GetBatch().GetExcluded() != 6 {
					t.Errorf("%v", r)
				}
			})
		}
	}
}

func TestGroupsWithTokenRewardsAreTrainedOn(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(drawing())
	parts := flat(0, 1)
	parts[1].Header.TokenRewards = true // its tokens differ
	s.publish(parts[:2]...)
	s.samples(2)
	s.publish(parts[2:]...)
	s.publish(flat(1, 1)...)
	s.publish(groupOf(2, 0, 0)...)
	s.samples(3 * size)
	if l := s.until("samples", func(l *bufferv1.LedgerState) bool { return true }); l.GetExcluded() != 0 {
		t.Errorf("left out before the digest of its weights is known: %v", l)
	}
	s.record(0)
	if got := positions(t, s.lease(1)); !reflect.DeepEqual(got, []uint64{0, 2}) {
		t.Errorf("batch of %v", got)
	}
}

// Ledgers that get the same groups in random orders, with crashes, have the same steps.
func TestDynamicSamplingDependsOnPositionsAlone(t *testing.T) {
	t.Parallel()
	const steps = 5
	var want [steps][]uint64
	next := uint64(0)
	for n := range want {
		for len(want[n]) < 2 {
			if equal, _ := scores(next); !equal {
				want[n] = append(want[n], next)
			}
			next++
		}
	}
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			s := setup(t)
			s.open(drawing())
			s.record(0)
			rng := rand.New(rand.NewPCG(seed, 1))
			var all []*trajectoryv1.TrajectoryEnvelope
			for p := range next {
				equal, reward := scores(p)
				if equal {
					all = append(all, flat(p, reward)...)
				} else {
					all = append(all, groupOf(p, 0, 0)...)
				}
			}
			rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			for len(all) > 0 {
				n := rng.IntN(min(len(all), 9)) + 1
				s.publish(all[:n]...)
				if rng.IntN(6) > 0 { // otherwise they are delivered twice
					all = all[n:]
				}
			}
			for n := range uint64(steps) {
				b := s.lease(n + 1)
				if got := positions(t, b); !reflect.DeepEqual(got, want[n]) {
					t.Errorf("step %d takes %v, want %v", n+1, got, want[n])
				}
				if rng.IntN(3) == 0 {
					s.restart()
				}
				s.commit(b)
			}
			groups, err := s.client.ListGroups(t.Context(), &bufferv1.ListGroupsRequest{RunId: run, States: []bufferv1.GroupState{ledger.Excluded}})
			if err != nil || len(groups.GetGroups()) != int(next)-2*steps {
				t.Fatalf("%v, %v", groups, err)
			}
			for _, g := range groups.GetGroups() {
				if g.GetReason() != ledger.ReasonZeroAdvantage || g.GetStep() == 0 {
					t.Errorf("%v", g)
				}
			}
		})
	}
}

// scores says which positions have equal rewards, and which reward.
func scores(position uint64) (equal bool, reward float64) {
	return position%3 == 1 || position%7 == 2, float64(position % 2)
}
