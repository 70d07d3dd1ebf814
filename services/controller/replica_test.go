package controller

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/lease"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// fencedStore is the store of a leader that loses its lease when lost is set.
type fencedStore struct {
	Store
	lost atomic.Bool
}

func (s *fencedStore) Save(ctx context.Context, d *Drive, by *fencev1.Fence) error {
	if s.lost.Load() {
		return lease.ErrFenced
	}
	return s.Store.Save(ctx, d, by)
}

// Two controllers drive one run: the first loses its lease at some call without noticing. It must
// not report that the run failed, and must not call the learner; the second makes every step.
func TestTwoControllers(t *testing.T) {
	t.Parallel()
	undisturbed := newWorld(t)
	s, stop := begin(t, undisturbed)
	finish(t, s)
	stop()
	for at := 1; at < undisturbed.calls; at += 3 {
		w := newWorld(t)
		store := &fencedStore{Store: w}
		old, err := New(Config{Retry: time.Millisecond}, Deps{
			Store: store, Buffer: w, Snapshots: w, Scheduler: w, Registry: w, Dial: w.dial, Events: w,
		})
		if err != nil {
			t.Fatal(err)
		}
		life, end := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); _ = old.Run(life) }()
		lost := make(chan struct{})
		w.fault, w.after = at, true
		w.onFault = func() {
			store.lost.Store(true)
			close(lost)
		}
		if _, err := old.StartRun(t.Context(), request(t, steps)); err != nil {
			t.Fatal(err)
		}
		select {
		case <-lost:
		case <-time.After(2 * time.Minute):
			t.Fatalf("call %d was not made", at)
		}
		old.mu.Lock()
		d := old.drives[run]
		old.mu.Unlock()
		<-d.done
		if n := len(w.completed); n > 0 {
			t.Errorf("call %d: the old controller reported %v", at, w.completed)
		}
		s, stop := w.start()
		if _, err := s.StartRun(t.Context(), d.spec); err != nil { // the scheduler repeats its request
			t.Fatal(err)
		}
		finish(t, s)
		correct(t, w)
		for _, c := range w.completed {
			if c.GetState() != runv1.RunState_RUN_STATE_SUCCEEDED {
				t.Errorf("call %d: a controller reported %v", at, c)
			}
		}
		stop()
		end()
		<-ended
	}
}
