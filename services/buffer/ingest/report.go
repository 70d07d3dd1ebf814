package ingest

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"

	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
)

// Events takes events; Emit never blocks and fills in id and time. *telemetry.Events is one.
type Events interface {
	Emit(event *eventv1.Event)
}

// Reporter emits the events of one run.
type Reporter struct {
	run    string
	events Events
	log    *slog.Logger
}

// NewReporter emits events of a run, and logs refusals to log.
func NewReporter(run string, events Events, log *slog.Logger) *Reporter {
	return &Reporter{run: run, events: events, log: log}
}

// Event emits an event with a machine-readable reason.
func (r *Reporter) Event(level eventv1.Level, reason, message string) {
	r.events.Emit(&eventv1.Event{RunId: r.run, Service: "buffer", Level: level, Kind: "log", Message: message, Attributes: map[string]string{"reason": reason}})
}

// Refused reports refused trajectories: one event per reason, which describes the first of them.
func (r *Reporter) Refused(refused []ledger.Refusal) {
	first, count := map[string]ledger.Refusal{}, map[string]int{}
	for _, refusal := range refused {
		if count[refusal.Reason]++; count[refusal.Reason] == 1 {
			first[refusal.Reason] = refusal
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(first)) {
		message := fmt.Sprintf("refused %d trajectories, first %s", count[reason], first[reason])
		r.log.Warn(message)
		r.Event(eventv1.Level_LEVEL_WARN, reason, message)
	}
}
