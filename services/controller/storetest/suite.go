// Package storetest is the suite that every controller.Store passes.
package storetest

import (
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
	"github.com/rollout-rl/rollout/services/controller"
)

// Run runs the suite. open returns an empty store, and reopen, which closes the store and opens it
// again.
func Run(t *testing.T, open func(t *testing.T) (store controller.Store, reopen func() controller.Store)) {
	drive := func(run string, incarnation uint32) *controller.Drive {
		return &controller.Drive{
			Spec:  &learnerv1.StartRunRequest{RunId: run, Fence: fencetest.Scheduler(incarnation, 1), RunDirectory: "/runs/" + run},
			Phase: learnerv1.Phase_PHASE_TRAINING, Step: 7, Active: true,
		}
	}
	save := func(t *testing.T, store controller.Store, d *controller.Drive) error {
		return store.Save(t.Context(), d, fencetest.Controller(d.Spec.GetFence().GetIncarnation(), 1))
	}
	equal := func(t *testing.T, got, want *controller.Drive) {
		t.Helper()
		if !proto.Equal(got.Spec, want.Spec) || !proto.Equal(got.Weights, want.Weights) || got.Phase != want.Phase ||
			got.Step != want.Step || got.Active != want.Active || string(got.Health) != string(want.Health) || string(got.Gates) != string(want.Gates) ||
			string(got.Evaluation) != string(want.Evaluation) {
			t.Fatalf("got %+v, want %+v", got, want)
		}
	}
	t.Run("unknown run", func(t *testing.T) {
		store, _ := open(t)
		if _, err := store.Get(t.Context(), "run-x"); !errors.Is(err, controller.ErrNotFound) {
			t.Fatalf("got %v", err)
		}
	})
	t.Run("the newest save wins and survives a close", func(t *testing.T) {
		store, reopen := open(t)
		first, second := drive("run-a", 1), drive("run-a", 2)
		first.Health, second.Health = []byte(`{"step":6}`), []byte(`{"step":7}`)
		first.Gates, second.Gates = []byte(`{"step":5}`), []byte(`{"step":6}`)
		first.Evaluation, second.Evaluation = []byte(`{"step":4}`), []byte(`{"step":5}`)
		second.Weights = &weightsv1.WeightsManifest{RunId: "run-a", Version: 7, Directory: "/w"}
		for _, d := range []*controller.Drive{first, second} {
			if err := save(t, store, d); err != nil {
				t.Fatal(err)
			}
		}
		got, err := reopen().Get(t.Context(), "run-a")
		if err != nil {
			t.Fatal(err)
		}
		equal(t, got, second)
	})
	t.Run("an older incarnation is refused", func(t *testing.T) {
		store, _ := open(t)
		newer := drive("run-a", 3)
		if err := save(t, store, newer); err != nil {
			t.Fatal(err)
		}
		late := drive("run-a", 2)
		late.Active, late.Phase = false, learnerv1.Phase_PHASE_STOPPED
		if err := save(t, store, late); !errors.Is(err, fence.ErrFenced) {
			t.Errorf("an older incarnation was saved: %v", err)
		}
		got, err := store.Get(t.Context(), "run-a")
		if err != nil {
			t.Fatal(err)
		}
		equal(t, got, newer)
	})
	t.Run("a former scheduler changes nothing", func(t *testing.T) {
		store, _ := open(t)
		kept := drive("run-a", 1)
		if err := errors.Join(save(t, store, kept), store.Admit(t.Context(), "run-a", fencetest.Scheduler(1, 2))); err != nil {
			t.Fatal(err)
		}
		for what, err := range map[string]error{
			"admitted": store.Admit(t.Context(), "run-b", fencetest.Scheduler(1, 1)),
			"saved":    store.Save(t.Context(), drive("run-a", 2), fencetest.Scheduler(2, 1)),
			"deleted":  store.Delete(t.Context(), "run-a", fencetest.Scheduler(1, 1)),
		} {
			if !errors.Is(err, fence.ErrFenced) {
				t.Errorf("a former scheduler has %s: %v", what, err)
			}
		}
		got, err := store.Get(t.Context(), "run-a")
		if err != nil {
			t.Fatal(err)
		}
		equal(t, got, kept)
	})
	t.Run("a deleted drive is unknown", func(t *testing.T) {
		store, _ := open(t)
		if err := errors.Join(save(t, store, drive("run-a", 1)), save(t, store, drive("run-b", 1)),
			store.Delete(t.Context(), "run-a", fencetest.Scheduler(1, 1)), store.Delete(t.Context(), "run-x", fencetest.Scheduler(1, 1))); err != nil {
			t.Fatal(err)
		}
		for what, err := range map[string]error{
			"saved": save(t, store, drive("run-a", 2)), "admitted": store.Admit(t.Context(), "run-a", fencetest.Scheduler(2, 2)),
		} {
			if !errors.Is(err, fence.ErrDeleted) {
				t.Errorf("%s after the deletion: %v", what, err)
			}
		}
		if _, err := store.Get(t.Context(), "run-a"); !errors.Is(err, controller.ErrNotFound) {
			t.Errorf("got %v", err)
		}
		if _, err := store.Get(t.Context(), "run-b"); err != nil {
			t.Error(err)
		}
	})
	t.Run("only active drives are listed, by run", func(t *testing.T) {
		store, _ := open(t)
		ended := drive("run-b", 1)
		ended.Active, ended.Phase = false, learnerv1.Phase_PHASE_FINISHED
		for _, d := range []*controller.Drive{drive("run-c", 1), ended, drive("run-a", 3)} {
			if err := save(t, store, d); err != nil {
				t.Fatal(err)
			}
		}
		got, err := store.Active(t.Context())
		if err != nil || len(got) != 2 {
			t.Fatalf("got %d drives, %v", len(got), err)
		}
		equal(t, got[0], drive("run-a", 3))
		equal(t, got[1], drive("run-c", 1))
	})
}
