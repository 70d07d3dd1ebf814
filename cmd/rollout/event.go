package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
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
		if near := nearest(name, there); near != "" {
			return usage(text+"; did you mean `%s`? There are %s", name, flag, near, strings.Join(there, ", "))
		}
		return usage(text+": there are %s", name, flag, strings.Join(there, ", "))
	}
	return nil
}

// nearest is the name that most likely was meant, "" where none is near; it measures as the suggestions of commands do.
func nearest(name string, there []string) string {
	group := &cobra.Command{SuggestionsMinimumDistance: 2}
	for _, candidate := range there {
		group.AddCommand(&cobra.Command{Use: candidate, Run: func(*cobra.Command, []string) {}})
	}
	if near := group.SuggestionsFor(name); len(near) > 0 {
		return near[0]
	}
	return ""
}
