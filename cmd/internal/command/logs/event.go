package logs

import (
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/libs/worker"
)

// eventKinds are the kinds of events that services and workers emit, without telemetry. A test
// compares the list with their sources.
var eventKinds = []string{
	"run.state", "phase", "step.committed", "step.flat", "step.short", "health.collapse", "gate.fired", "gate.no_metric", "gate.restored", "gate.not_restored",
	"completions", "eval.finished", "eval.skipped", "weights.delivered", "lineage.forked", "weights.left_out", "weights.caught_up", "snapshot.created",
	"worker.started", "worker.adopted", "worker.exited", "worker.fenced", "group.excluded", "group.lost", "stream.lost", "step.refused", "sink.failed", "sink.finished", "log",
}

// eventServices returns the sources of events: services, rolloutd, and workers.
func eventServices() []string {
	var names []string
	for _, target := range client.Targets {
		names = append(names, target.Name)
	}
	return append(names, "rolloutd", worker.Inference.Service(), worker.Learner.Service(), worker.Trackers.Service())
}
