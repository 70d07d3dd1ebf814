package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/id"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

func TestUnknownFiltersAreRefused(t *testing.T) {
	t.Parallel()
	runCases(t, map[string]commandCase{
		"logs-bad-service":   {args: "logs tail addition-grpo --service bufer"},
		"logs-other-service": {args: "logs tail addition-grpo --service postgres"},
		"logs-bad-kind":      {args: "logs tail addition-grpo --kind step.commited"},
	})
	got := call{plane: newPlane(t, &fake{state: 7, history: story()})}.run(t, "logs", "tail", "addition-grpo", "--service", "inference-worker/inference-0")
	if got.code != 0 {
		t.Error(got.text())
	}
}

// A repeated warning is printed again with its count, sorted by time.
func TestEventsAreSortedByTime(t *testing.T) {
	t.Parallel()
	begin := story()[0].GetTime().AsTime()
	var history []*eventv1.Event
	add := func(second int, level eventv1.Level, text string) {
		at := begin.Add(time.Duration(second) * time.Second)
		history = append(history, &eventv1.Event{Sequence: uint64(second + 1), EventId: id.New(at), RunId: runID, Time: timestamppb.New(at), Service: "buffer", Kind: "log", Level: level, Message: text})
	}
	add(0, eventv1.Level_LEVEL_WARN, "try 1 failed")
	add(1, eventv1.Level_LEVEL_INFO, "first")
	add(2, eventv1.Level_LEVEL_WARN, "try 2 failed")
	add(3, eventv1.Level_LEVEL_WARN, "try 3 failed")
	add(4, eventv1.Level_LEVEL_INFO, "second")
	got := call{plane: newPlane(t, &fake{state: 7, history: history})}.run(t, "logs", "tail", "addition-grpo")
	var reported []string
	for _, line := range strings.Split(strings.TrimSpace(got.stdout), "\n") {
		_, text, _ := strings.Cut(line, " buffer ")
		reported = append(reported, text)
	}
	if want := []string{"try 1 failed", "first", "try 3 failed (2 times)", "second"}; !slices.Equal(reported, want) {
		t.Errorf("reported %q\n%s", reported, got.text())
	}
}
