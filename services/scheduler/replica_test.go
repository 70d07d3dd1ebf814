package scheduler_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/sqlstore"
)

// lead begins a scheduler's term, whatever the one before does.
func (w *world) lead(store *sqlstore.Store) (*generation, *sqlstore.Store) {
	w.t.Helper()
	table := store.Lease()
	for {
		seen, err := table.Read(w.t.Context())
		if err != nil {
			w.t.Fatal(err)
		}
		if mine, err := table.Take(w.t.Context(), seen, "x", ""); err == nil {
			w.store = store.Fenced(table.Fence(mine.Epoch))
			return w.start(), w.store
		}
	}
}

// Two schedulers have one run: the first was suspended and lost its lease without notice. It issues
// nothing, records nothing, and leaves the ledger, streams, and controller of the run alone; the
// second one finishes the run.
func TestTwoSchedulers(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		w := setupAt(t, place(t))
		store := w.store
		w.config.ResumeOnStart = true
		w.mesh.held = true
		old, oldStore := w.lead(store)
		run := w.create(plan(3, "sync", 0, false)).GetRunId()
		w.waitState(run, scheduler.Running)

		_, _ = w.lead(store)
		w.wait(run, func(s *runv1.RunStatus) bool {
			return s.GetRun().GetState() == scheduler.Running && s.GetRun().GetIncarnation() == 2
		})
		if err := oldStore.Advance(t.Context(), run, 0, 1); !errors.Is(err, lease.ErrFenced) {
			t.Errorf("the old one moves the cursor: %v", err)
		}
		if _, err := old.CancelRun(t.Context(), &runv1.CancelRunRequest{RunId: run}); err != nil {
			t.Log("the old one refuses a request:", err)
		}
		old.stop() // as when it finds out that it does not lead
		w.mesh.do(func() { w.mesh.held = false })
		w.waitState(run, scheduler.Succeeded)
		w.whole(3)
		cursor, err := store.Cursor(context.Background(), run)
		if err != nil || cursor.Position != 9 {
			t.Errorf("cursor %+v, %v", cursor, err)
		}
	})
}

// A scheduler is suspended right after its last check of the lease, while it ends a run, and
// continues when another one conducts the run: its calls have no effect.
func TestOldSchedulerWakesUp(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		for _, at := range []string{"StopRun", "CloseLedger", "PurgeWork"} {
			t.Run(at, func(t *testing.T) {
				t.Parallel()
				w := setupAt(t, place(t))
				store := w.store
				w.config.ResumeOnStart = true
				w.mesh.held = true
				old, _ := w.lead(store)
				run := w.create(plan(3, "sync", 0, false)).GetRunId()
				w.waitState(run, scheduler.Running)
				frozen := old.gate.freeze(at)
				if _, err := old.CancelRun(t.Context(), &runv1.CancelRunRequest{RunId: run}); err != nil {
					t.Fatal(err)
				}
				<-frozen.reached

				_, _ = w.lead(store)
				w.wait(run, func(s *runv1.RunStatus) bool {
					return s.GetRun().GetState() == scheduler.Running && s.GetRun().GetIncarnation() == 2 && s.GetQueues().GetInFlight() > 0
				})
				const groups = 3 // of the first step, all of which are published; none is sampled
				w.mesh.until("the new incarnation's groups", func() bool { return len(w.mesh.queue) == groups })
				close(frozen.thaw)
				old.stop()
				w.mesh.read(func() {
					if at != "PurgeWork" && !slices.Contains(w.mesh.refused, at) {
						t.Errorf("%s of an old incarnation was not refused: %v", at, w.mesh.refused)
					}
					if !w.mesh.open || w.mesh.stopping || len(w.mesh.queue) != groups {
						t.Errorf("ledger open %v, controller stopped %v, %d groups in the stream", w.mesh.open, w.mesh.stopping, len(w.mesh.queue))
					}
				})
				w.mesh.do(func() { w.mesh.held = false })
				if got := w.waitState(run, scheduler.Succeeded).GetRun().GetIncarnation(); got != 2 {
					t.Errorf("incarnation %d", got)
				}
				w.whole(3)
			})
		}
	})
}

// A scheduler died after it recorded the success of a run and before it removed the streams. The
// next one removes them.
func TestStreamsOfAnEndedRunAreSwept(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	run := w.create(plan(2, "sync", 0, false)).GetRunId()
	w.waitState(run, scheduler.Succeeded)
	w.generation.stop()
	w.mesh.do(func() { w.mesh.streams = "there" })
	w.start()
	w.mesh.until("the streams to be gone", func() bool { return w.mesh.streams == "deleted" })
}
