package bus

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/proto/gen/names"
)

// EnsureRun creates the WORK and TRAJ streams of a run and their consumers, or changes them to the
// settings of streams.go. Stored messages remain. It may be called again and from several
// processes.
func (b *Bus) EnsureRun(ctx context.Context, run string) error {
	if err := checkRun(run); err != nil {
		return err
	}
	replicas := b.Replicas()
	stream, consumer := work(run, replicas)
	if err := b.ensure(ctx, stream, consumer); err != nil {
		return err
	}
	stream, consumer = traj(run, replicas)
	return b.ensure(ctx, stream, consumer)
}

// DeleteRun removes the streams of a run with all their messages. Missing streams are not an error.
func (b *Bus) DeleteRun(ctx context.Context, run string) error {
	if err := checkRun(run); err != nil {
		return err
	}
	for _, name := range []string{names.WorkStream(run), names.TrajStream(run)} {
		err := order(ctx, func(ctx context.Context) error { return b.js.DeleteStream(ctx, name) })
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return fmt.Errorf("delete stream %s: %w", name, mapError(err))
		}
	}
	return nil
}

// WorkMark is the place that the next work item of a run gets.
func (b *Bus) WorkMark(ctx context.Context, run string) (uint64, error) {
	if err := checkRun(run); err != nil {
		return 0, err
	}
	s, err := b.stream(ctx, names.WorkStream(run))
	if err != nil {
		return 0, fmt.Errorf("mark the work of %s: %w", run, mapError(err))
	}
	return s.CachedInfo().State.LastSeq + 1, nil
}

// Runs lists the runs that have streams, in no order.
func (b *Bus) Runs(ctx context.Context) ([]string, error) {
	streams, err := ask(ctx, func(ctx context.Context) ([]string, error) {
		listed := b.js.StreamNames(ctx)
		var found []string
		for name := range listed.Name() {
			found = append(found, name)
		}
		return found, listed.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("list the streams of runs: %w", mapError(err))
	}
	runs := map[string]bool{}
	for _, name := range streams {
		for _, prefix := range []string{names.WorkStream(""), names.TrajStream("")} {
			if run, ok := strings.CutPrefix(name, prefix); ok {
				runs[run] = true
			}
		}
	}
	return slices.Collect(maps.Keys(runs)), nil
}

// PurgeWork drops the work items of a run before a mark that no worker has acked, as when a run is
// cancelled. Who takes the mark, then verifies that it still leads the run, then purges, drops no
// items of another leader even if it was paused in between.
func (b *Bus) PurgeWork(ctx context.Context, run string, before uint64) error {
	if err := checkRun(run); err != nil {
		return err
	}
	s, err := b.stream(ctx, names.WorkStream(run))
	if err != nil {
		return fmt.Errorf("purge work of %s: %w", run, mapError(err))
	}
	until := jetstream.WithPurgeSequence(max(before, 1)) // 0 would mean all
	if err := order(ctx, func(ctx context.Context) error { return s.Purge(ctx, until) }); err != nil {
		return fmt.Errorf("purge work of %s: %w", run, mapError(err))
	}
	return nil
}

// EnsureEvents makes the EVENTS stream and its consumer.
func (b *Bus) EnsureEvents(ctx context.Context) error {
	stream, consumer := events(b.Replicas())
	return b.ensure(ctx, stream, consumer)
}

// stream looks a stream up, with its newest state.
func (b *Bus) stream(ctx context.Context, name string) (jetstream.Stream, error) {
	return ask(ctx, func(ctx context.Context) (jetstream.Stream, error) { return b.js.Stream(ctx, name) })
}

func (b *Bus) ensure(ctx context.Context, s jetstream.StreamConfig, c jetstream.ConsumerConfig) error {
	if _, err := ask(ctx, func(ctx context.Context) (jetstream.Stream, error) { return b.js.CreateOrUpdateStream(ctx, s) }); err != nil {
		return fmt.Errorf("ensure stream %s: %w", s.Name, mapError(err))
	}
	_, err := ask(ctx, func(ctx context.Context) (jetstream.Consumer, error) {
		return b.js.CreateOrUpdateConsumer(ctx, s.Name, c)
	})
	if err != nil {
		return fmt.Errorf("ensure consumer %s of %s: %w", c.Durable, s.Name, mapError(err))
	}
	return nil
}

func checkRun(run string) error {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
	if run == "" || strings.Trim(run, plain) != "" || len(run) > 128 {
		return ErrRunName.With("run", run)
	}
	return nil
}

// ErrRunName reports a run id that cannot be part of a subject.
var ErrRunName = rpcerr.New(codes.InvalidArgument, "BUS_RUN_NAME", "a run id in a subject may contain only letters, digits, - and _")
