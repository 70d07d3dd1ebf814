package controller

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	"github.com/rollout-rl/rollout/services/controller/health"
)

// vitals is the health check of a run: it reports what a health.Monitor finds, and stops the drive
// if the run is configured so. Only the goroutine of the drive uses it.
type vitals struct {
	settings
	monitor   *health.Monitor
	events    *reporter
	snapshots Snapshots
	retries   retries
	log       *slog.Logger
}

func newVitals(s settings, stored []byte, events *reporter, snapshots Snapshots, retries retries, log *slog.Logger) *vitals {
	monitor, err := health.New(s.cfg, stored)
	if err != nil {
		log.Warn("the health check starts again", "error", err)
	}
	return &vitals{settings: s, monitor: monitor, events: events, snapshots: snapshots, retries: retries, log: log}
}

// observe judges a committed step. The error ends the drive: its reason is that of the collapse.
func (v *vitals) observe(ctx context.Context, step uint64, metrics map[string]float64) error {
	var halt error
	for _, f := range v.monitor.Observe(step, metrics) {
		stops := v.cfg.GetHealth().GetOnCollapse() != "warn" && !f.Repeated && halt == nil
		snapshot := v.healthy(ctx, f, stops)
		v.report(f, snapshot, stops)
		if stops {
			v.monitor.Halt(f, v.incarnation)
			halt = v.failure(f, snapshot)
		}
	}
	return halt
}

// halted returns the error that ended this incarnation before; nil without one.
func (v *vitals) halted(ctx context.Context) error {
	f := v.monitor.Halted(v.incarnation)
	if f == nil {
		return nil
	}
	return v.failure(*f, v.healthy(ctx, *f, true))
}

// behind reports whether the check lacks a committed step.
func (v *vitals) behind(step uint64) bool { return v.cfg.GetHealth() != nil && v.monitor.Step() < step }

// failure is the error of a run that stops because of a finding.
func (v *vitals) failure(f health.Finding, snapshot *snapshotv1.Snapshot) error {
	return rpcerr.New(codes.FailedPrecondition, f.Reason, "step %d: %s. %s", f.Step, f.Message(), v.restart(snapshot))
}

// restart describes how to start again from before the collapse.
func (v *vitals) restart(snapshot *snapshotv1.Snapshot) string {
	if snapshot == nil {
		return "No snapshot is older than the collapse: start again from the model"
	}
	return fmt.Sprintf("The newest healthy snapshot is %s, of step %d: `rollout run --config FILE --from %s --continue`",
		snapshot.GetSnapshotId(), snapshot.GetStep(), snapshot.GetSnapshotId())
}

func (v *vitals) report(f health.Finding, snapshot *snapshotv1.Snapshot, stops bool) {
	level := eventv1.Level_LEVEL_WARN
	if stops {
		level = eventv1.Level_LEVEL_ERROR
	}
	v.events.emit(&eventv1.Event{
		// The same finding has the same id, so that a repeated step does not report it twice.
		EventId: id.At(time.UnixMilli(int64(f.Step)), fmt.Sprintf("health %s %s %d", v.runID, f.Reason, f.Step)),
		Kind:    "health.collapse", Level: level, Step: f.Step, Message: f.Message() + ". " + v.restart(snapshot),
		Attributes: map[string]string{
			"reason": f.Reason, "metric": f.Metric, "since": strconv.FormatUint(f.Since, 10), "cause": f.Cause, "fix": f.Fix,
			"action": v.cfg.GetHealth().GetOnCollapse(), "snapshot": snapshot.GetSnapshotId(),
		},
		Metrics: map[string]float64{"value": f.Value, "limit": f.Limit},
	})
}

// healthy is the newest snapshot of the run from before a collapse; nil without one. keep exempts
// it from retention.
func (v *vitals) healthy(ctx context.Context, f health.Finding, keep bool) *snapshotv1.Snapshot {
	listed, err := call(ctx, v.retries, "snapshot", v.snapshots.ListSnapshots, &snapshotv1.ListSnapshotsRequest{
		RunId: v.runID, Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, PageSize: 1000,
	})
	for _, s := range listed.GetSnapshots() {
		if s.GetStep() >= f.Since {
			continue
		}
		if keep {
			_, err = call(ctx, v.retries, "snapshot", v.snapshots.PinSnapshot, &snapshotv1.PinSnapshotRequest{SnapshotId: s.GetSnapshotId(), Fence: v.fence})
		}
		if err != nil {
			v.log.WarnContext(ctx, "the healthy snapshot is subject to snapshot.keep", "snapshot", s.GetSnapshotId(), "error", err)
		}
		return s
	}
	if err != nil {
		v.log.WarnContext(ctx, "the snapshots of the run could not be listed", "error", err)
	}
	return nil
}

// stops reports whether a reason ends the run instead of pausing it.
func (s settings) stops(reason string) bool {
	return refusal.Health(reason) && s.cfg.GetHealth().GetOnCollapse() == "stop"
}
