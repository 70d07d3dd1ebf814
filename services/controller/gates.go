package controller

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/condition"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	"github.com/rollout-rl/rollout/services/controller/gate"
)

// gates stores what a gate.Monitor decides, and reports it. What it decides is stored before
// anything follows from it, so that a gate that has fired stays so, whatever dies. Only the
// goroutine of the drive uses it.
type gates struct {
	settings
	monitor *gate.Monitor
	record  *record
	events  *reporter
}

func newGateMonitor(s settings, stored []byte, log *slog.Logger) *gate.Monitor {
	monitor, err := gate.New(s.cfg, stored)
	if err != nil {
		log.Warn("the gates start again", "error", err)
	}
	return monitor
}

// behind reports whether the gates lack a committed step.
func (g *gates) behind(step uint64) bool { return !g.monitor.Idle() && g.monitor.Step() < step }

// observeStep judges a committed step.
func (g *gates) observeStep(ctx context.Context, step uint64, metrics map[string]float64) error {
	seen := g.monitor.ObserveStep(step, metrics)
	if len(seen.Fired)+len(seen.Missing) == 0 { // the drive is saved after each step
		return nil
	}
	return g.conclude(ctx, step, seen)
}

// observeEvaluation judges the result of an evaluation; nil: it has none yet, or was skipped.
func (g *gates) observeEvaluation(ctx context.Context, step uint64, metrics map[string]float64, first bool) error {
	if metrics == nil {
		return nil
	}
	seen := g.monitor.ObserveEvaluation(step, metrics, first)
	if !seen.New {
		return nil
	}
	return g.conclude(ctx, step, seen)
}

// observeReserved judges the evaluation that reserved workers have made, if one has ended.
func (g *gates) observeReserved(ctx context.Context, r *reserved) error {
	e := r.result()
	if e == nil {
		return nil
	}
	if err := g.observeEvaluation(ctx, e.step, e.means, e.first); err != nil {
		return err
	}
	r.observed(e.step)
	return nil
}

// conclude stores what was decided and emits it.
func (g *gates) conclude(ctx context.Context, step uint64, seen gate.Observation) error {
	if g.record.save(ctx, true) {
		return errTaken
	}
	for _, f := range seen.Fired {
		g.fired(f)
	}
	for _, name := range seen.Missing {
		g.missing(step, name)
	}
	return nil
}

// restored reports whether a gate replaced the weights of a step by those with the digest.
func (g *gates) restored(step uint64, digest string) bool {
	r := g.monitor.Restored(step)
	return r != nil && r.Digest == digest
}

// setRestore stores what is restored.
func (g *gates) setRestore(ctx context.Context, r gate.Restore) error {
	g.monitor.SetRestore(r)
	if g.record.save(ctx, true) {
		return errTaken
	}
	return nil
}

// repeat emits what fired at the last committed step or later: the process that stored it may have
// died before it emitted the events.
func (g *gates) repeat(step uint64) {
	for _, f := range g.monitor.FiredSince(0) {
		if f.Step >= step {
			g.fired(f)
		}
		if r := f.Restore; r != nil && r.Done && r.Step >= step {
			g.replaced(f)
		}
	}
}

// replaced emits what a gate with the action restore_best restored.
func (g *gates) replaced(f gate.Fired) {
	r := f.Restore
	e := &eventv1.Event{
		EventId: id.At(time.UnixMilli(int64(r.Step)), fmt.Sprintf("gate.restored %s %s", g.runID, f.Gate)),
		Kind:    "gate.restored", Step: r.Step,
		Attributes: map[string]string{"gate": f.Gate, "condition": f.Condition, "snapshot": r.Snapshot, "digest": r.Digest},
		Metrics:    map[string]float64{"from_step": float64(r.From)},
		Message:    fmt.Sprintf("gate %s: after step %d the run continues with the state of step %d (snapshot %s): %s", f.Gate, r.Step, r.From, r.Snapshot, f.Evidence()),
	}
	if r.Snapshot == "" {
		e.Kind, e.Level, e.Metrics = "gate.not_restored", eventv1.Level_LEVEL_WARN, nil
		e.Attributes = map[string]string{"gate": f.Gate, "condition": f.Condition}
		e.Message = fmt.Sprintf("gate %s restores nothing after step %d, because %s: %s", f.Gate, r.Step, r.Why, f.Evidence())
	}
	g.events.emit(e)
}

// fired emits that a gate fired.
func (g *gates) fired(f gate.Fired) {
	attributes := map[string]string{
		"gate": f.Gate, "action": f.Action, "condition": f.Condition, "metric": f.Metric, "step": strconv.FormatUint(f.Step, 10),
	}
	metrics := map[string]float64{"value": f.Value}
	if f.Window > 0 {
		metrics["best"], metrics["best_step"] = f.Best, float64(f.BestStep)
	}
	if f.Action == gate.Promote {
		attributes["snapshot_name"] = "gate-" + f.Gate
	}
	g.events.emit(&eventv1.Event{
		// The same firing has the same id, so that a repeated event is not stored twice.
		EventId: id.At(time.UnixMilli(int64(f.Step)), fmt.Sprintf("gate %s %s", g.runID, f.Gate)),
		Kind:    "gate.fired", Step: f.Step, Attributes: attributes, Metrics: metrics,
		Message: fmt.Sprintf("gate %s (%s): %s", f.Gate, f.Action, f.Evidence()),
	})
}

// missing emits that a gate cannot be judged.
func (g *gates) missing(step uint64, name string) {
	c := g.monitor.Condition(name)
	source := "the steps so far"
	if condition.Evaluated(c.Metric) {
		source = "the evaluations so far"
	}
	g.events.emit(&eventv1.Event{
		EventId: id.At(time.UnixMilli(int64(step)), fmt.Sprintf("gate.no_metric %s %s", g.runID, name)),
		Kind:    "gate.no_metric", Level: eventv1.Level_LEVEL_WARN, Step: step,
		Attributes: map[string]string{"gate": name, "condition": c.String(), "metric": c.Metric},
		Message: fmt.Sprintf("gate %s cannot fire: %s lack the metric %s; `rollout report %s` shows the metrics of the run", name, source,
			c.Metric, g.runID),
	})
}

// gateError is the error of a run that a gate ends.
func gateError(f gate.Fired) error {
	reason := refusal.StoppedByGate
	if f.Action == gate.Pause {
		reason = refusal.PausedByGate
	}
	return rpcerr.New(codes.FailedPrecondition, reason, "gate %s: %s", f.Gate, f.Evidence())
}

// gated reports whether a gate ended the run.
func gated(err error) bool {
	reason := rpcerr.Reason(err)
	return reason == refusal.StoppedByGate || reason == refusal.PausedByGate
}
