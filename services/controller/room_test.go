package controller

import (
	"context"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// fakeDisk has space unless full is set.
type fakeDisk struct {
	mu    sync.Mutex
	full  map[string]bool // by the name of the write
	needs map[string]uint64
}

func (d *fakeDisk) Missing(need uint64, what string, _ bool) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.needs == nil {
		d.needs = map[string]uint64{}
	}
	d.needs[what] = need
	if d.full[what] {
		return "nothing is free for " + what
	}
	return ""
}

func (d *fakeDisk) fill(what ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.full = map[string]bool{}
	for _, name := range what {
		d.full[name] = true
	}
}

func stalled(p *learnerv1.Progress) bool {
	return p.GetWait().GetReason() == rpcerr.ReasonDiskFull && p.GetWait().GetOwner() == "user" && p.GetWait().GetFix() != "" && p.GetWait().GetEvidence() != ""
}

// A drive waits before it writes what the disk has no space for, says so, and continues by itself.
func TestDriveWaitsForSpace(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"the next step with the next snapshot", nextSnapshot} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.disk.fill(what)
			s, stop := begin(t, w)
			defer stop()
			await(t, s, "wait for space", stalled)
			w.disk.fill()
			finish(t, s)
			correct(t, w)
		})
	}
}

// Each write that finds a full disk is repeated until there is space, and the run makes the same
// steps as an undisturbed one.
func TestFullDiskAtEveryCall(t *testing.T) {
	t.Parallel()
	undisturbed := newWorld(t)
	s, stop := begin(t, undisturbed)
	finish(t, s)
	stop()
	reads := []string{"Initialize", "Evaluate", "EvaluateLoss", "CompleteRun"}
	names := map[string]bool{}
	for _, name := range undisturbed.trace {
		names[name] = !slices.Contains(reads, name)
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		for _, after := range []bool{false, true} {
			if !names[name] {
				continue
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				w.full, w.after = map[string]int{name: 3}, after
				s, stop := begin(t, w)
				defer stop()
				finish(t, s)
				correct(t, w)
			})
		}
	}
}

// A request to stop does not wait for space: the run stops without a snapshot.
func TestDrainOnAFullDisk(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"the next step with the next snapshot", nextSnapshot} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.disk.fill(what)
			s, stop := begin(t, w)
			defer stop()
			await(t, s, "wait for space", stalled)
			if _, err := s.StopRun(t.Context(), &learnerv1.StopRunRequest{RunId: run, Drain: true, Fence: fencetest.Scheduler(1, 1)}); err != nil {
				t.Fatal(err)
			}
			p := await(t, s, "end", func(p *learnerv1.Progress) bool { return ended(p.GetPhase()) })
			if p.GetPhase() != stopped || p.GetWait() != nil || len(w.snapshots) != 0 {
				t.Errorf("%v, %d snapshots", p, len(w.snapshots))
			}
		})
	}
}

// The next snapshot is as large as the last one, or else about three times the weights.
func TestSizeOfTheNextSnapshot(t *testing.T) {
	t.Parallel()
	disk := &fakeDisk{}
	r := &room{disk: disk, progress: newProgress(&reporter{bus: &warnings{}}, &learnerv1.Progress{})}
	weights := &weightsv1.WeightsManifest{Bytes: 100}
	for state, want := range map[uint64]uint64{0: 100 + 300, 700: 100 + 700} {
		r.state = state
		if err := r.waitForStep(t.Context(), weights, func(context.Context) error { return nil }); err != nil {
			t.Fatal(err)
		}
		if got := disk.needs["the next step with the next snapshot"]; got != want {
			t.Errorf("needs %d bytes, want %d", got, want)
		}
	}
}

// A run does not look as if it continued while the write that fails is tried again.
func TestRepeatedWriteStaysStalled(t *testing.T) {
	t.Parallel()
	p := newProgress(&reporter{bus: &warnings{}}, &learnerv1.Progress{})
	r := &room{disk: &fakeDisk{}, progress: p, pause: time.Millisecond}
	tries := 0
	_, err := repeat(t.Context(), r, 100, "the next weights", func() (int, error) {
		if now, _ := p.read(); tries > 0 && !stalled(now) {
			t.Errorf("try %d: the run does not wait for space: %v", tries, now)
		}
		if tries++; tries < 4 {
			return 0, rpcerr.New(codes.ResourceExhausted, rpcerr.ReasonDiskFull, "no inodes").Fix("free some")
		}
		return tries, nil
	})
	if now, _ := p.read(); err != nil || tries != 4 || now.GetWait() != nil {
		t.Errorf("%d tries, %v: %v", tries, now, err)
	}
}
