package scheduler_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/storetest"
)

func TestNewRefusesAStateWithRunsOfAnotherPlanFormat(t *testing.T) {
	t.Parallel()
	w := setup(t)
	old := storetest.Sample("run-00000000000000000000000001", "old", scheduler.Succeeded)
	old.Plan = &planv1.Plan{Format: 1}
	if _, err := w.store.Create(t.Context(), old, "", scheduler.Cursor{}); err != nil {
		t.Fatal(err)
	}
	_, err := scheduler.New(w.config, scheduler.Deps{
		Store: w.store, Planner: w.planner, Buffer: w.mesh.ledger, Controller: w.mesh.controller, Snapshots: w.snapshots,
		Bus: w.mesh.bus, Registry: w.registry, Launcher: w.launcher, Dial: w.dial, Events: w.events, Log: slog.New(slog.DiscardHandler),
	})
	if !errors.Is(err, scheduler.ErrStateFormat) || !strings.Contains(err.Error(), old.GetRunId()) || !strings.Contains(rpcerr.Fix(err), "delete these runs") {
		t.Errorf("got %v, fix %q", err, rpcerr.Fix(err))
	}
}
