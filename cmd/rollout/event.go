package main

import (
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/nearest"
)

// eventKinds are the kinds of events that the services and workers give; a test holds the list against their sources.
var eventKinds = []string{
	"run.state", "phase", "step.committed", "step.flat", "step.short", "completions", "eval.finished", "weights.delivered", "snapshot.created",
	"worker.started", "worker.exited", "worker.fenced", "group.excluded", "step.refused", "sink.failed", "sink.finished", "sampling", "log",
}

// eventServices are those who give events: the services, the process that hosts them, and the workers.
func eventServices() []string {
	var names []string
	for _, target := range targets {
		names = append(names, target.name)
	}
	return append(names, "rolloutd", "inference-worker", "learner-worker", "sinks-worker")
}

// known refuses the first of the names that is none of those there are. What follows a slash names one worker.
func known(flag string, names, there []string) error {
	for _, name := range names {
		head, _, _ := strings.Cut(name, "/")
		if slices.Contains(there, head) {
			continue
		}
		text := "invalid argument %q for --%s"
		if near := nearest.To(name, there); near != "" {
			return usage(text+"; did you mean `%s`? There are %s", name, flag, near, strings.Join(there, ", "))
		}
		return usage(text+": there are %s", name, flag, strings.Join(there, ", "))
	}
	return nil
}
