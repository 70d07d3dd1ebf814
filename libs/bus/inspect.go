package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollout-rl/rollout/proto/gen/names"
)

// WorkItem is an attempt of a prompt group, as named by the subject of its message.
type WorkItem struct {
	Position uint64
	Attempt  uint32
}

// Subject is the subject of the item in the work stream of a run.
func (w WorkItem) Subject(run string) string {
	return fmt.Sprintf("%s.%d.%d", names.WorkSubject(run), w.Position, w.Attempt)
}

// parseWorkItem reads the subject of an item; false for subjects that name none.
func parseWorkItem(run, subject string) (WorkItem, bool) {
	rest, ok := strings.CutPrefix(subject, names.WorkSubject(run)+".")
	position, attempt, named := strings.Cut(rest, ".")
	p, err := strconv.ParseUint(position, 10, 64)
	a, err2 := strconv.ParseUint(attempt, 10, 32)
	return WorkItem{Position: p, Attempt: uint32(a)}, ok && named && err == nil && err2 == nil
}

// RunState is what the servers have of a run. The trajectories are counted after the work is
// listed: an item that is not listed was lost, or was acked, and then its trajectories are among
// those counted or were ingested.
type RunState struct {
	Missing      []string              // streams and consumers that do not exist
	Work         map[WorkItem]struct{} // the items that wait or are with a worker
	Trajectories Backlog
}

// Backlog is the range of messages in a stream that are not ingested, by their places. It is empty
// if First > Last.
type Backlog struct{ First, Last uint64 }

// Past reports whether nothing is left of the messages up to a place. It is also true if the stream
// was created again since.
func (b Backlog) Past(place uint64) bool { return b.First > place || b.Last < place }

// InspectRun lists what the servers have of a run. Missing streams are not an error.
func (b *Bus) InspectRun(ctx context.Context, run string) (*RunState, error) {
	if err := checkRun(run); err != nil {
		return nil, err
	}
	state := &RunState{Work: map[WorkItem]struct{}{}}
	work, err := b.inspect(ctx, state, names.WorkStream(run), names.WorkersConsumer, jetstream.WithSubjectFilter(names.WorkSubject(run)+".>"))
	if err != nil {
		return nil, err
	}
	for subject := range work.Subjects {
		if item, ok := parseWorkItem(run, subject); ok {
			state.Work[item] = struct{}{}
		}
	}
	trajectories, err := b.inspect(ctx, state, names.TrajStream(run), names.BufferConsumer)
	if err != nil {
		return nil, err
	}
	state.Trajectories = Backlog{First: max(trajectories.FirstSeq, 1), Last: trajectories.LastSeq}
	return state, nil
}

// inspect reads the state of a stream, and adds it or its consumer to the missing ones.
func (b *Bus) inspect(ctx context.Context, state *RunState, name, consumer string, options ...jetstream.StreamInfoOpt) (found jetstream.StreamState, err error) {
	s, err := b.stream(ctx, name)
	var info *jetstream.StreamInfo
	if err == nil {
		info, err = ask(ctx, func(ctx context.Context) (*jetstream.StreamInfo, error) { return s.Info(ctx, options...) })
	}
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		state.Missing = append(state.Missing, "stream "+name)
		return found, nil
	}
	if err != nil {
		return found, fmt.Errorf("inspect stream %s: %w", name, mapError(err))
	}
	_, err = ask(ctx, func(ctx context.Context) (jetstream.Consumer, error) { return s.Consumer(ctx, consumer) })
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		state.Missing = append(state.Missing, "consumer "+consumer+" of stream "+name)
		err = nil
	}
	if err != nil {
		return found, fmt.Errorf("inspect consumer %s of %s: %w", consumer, name, mapError(err))
	}
	return info.State, nil
}
