package bus

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// The names and settings of every stream and consumer of the project stand in this file and nowhere else.
const (
	// MaxPayload is the size of the largest message, in bytes. Payloads are inline up to 256 KiB and blob references above that;
	// a message carries some groups of them.
	MaxPayload = 8 << 20

	// WorkersConsumer is shared by the inference workers of a run.
	WorkersConsumer = "workers"
	// BufferConsumer is the buffer's place in a run's trajectories.
	BufferConsumer = "buffer"
	// EventStream holds the events of all runs.
	EventStream = "EVENTS"
	// StorageConsumer is the storage service's place in the events.
	StorageConsumer = "storage"
	// MeshEvents is the subject of events that belong to no run.
	MeshEvents = "rollout.events.mesh"

	// workAckWait is how long a worker may be silent (it acks progress every second) before its items go to another one. Three
	// missed beats and a margin: below that a busy kernel redelivers for nothing, above it a dead worker idles the learner.
	workAckWait = 4 * time.Second
	// trajAckWait is how long samples lie idle that a buffer had fetched when it was killed: the step that wants them waits as long.
	// A segment fsync and a ledger transaction take milliseconds; on a disk that is slower than this the twin is dropped.
	trajAckWait = 4 * time.Second
	// eventAckWait: nobody waits for events.
	eventAckWait = 30 * time.Second
	// maxAckPending bounds the unacked deliveries of a consumer. It is not the flow control (that is the scheduler's staleness
	// bound), so it is above every fleet's slots.
	maxAckPending = 1 << 16
	// There is no fsync a message (EmbeddedOptions.NoSync as rolloutd sets it; the default of a server of one's own is one in two
	// minutes): what a stream holds is made again from the scheduler's cursor and the buffer's ledger, and an fsync each would cost
	// 0.7 ms, thirty times the message itself. Who wants an ack to survive the power cut of a single server sets sync_interval:
	// always there; in a cluster the ack says that a majority of the replicas has the message.
	//
	// maxReplicas is what a cluster keeps of each stream and consumer where nothing else is configured: with three one node may
	// die, with more each message costs more and little is won.
	maxReplicas = 3

	// dedup is how long the server remembers Nats-Msg-Id: it spares the twin of a publish that was retried over a reconnect.
	// Exactly-once is the ledger's, which remembers for ever.
	dedup = 2 * time.Minute
	// Events are a transport here: storage owns the log. This much waits for a storage service that is down.
	eventsMaxAge   = 7 * 24 * time.Hour
	eventsMaxBytes = 1 << 30
)

// ErrRunName says that a run id can't be part of a subject.
var ErrRunName = rpcerr.New(codes.InvalidArgument, "BUS_RUN_NAME", "a run id in a subject has letters, digits, - and _ alone")

// WorkStream is the name of a run's work stream.
func WorkStream(run string) string { return "WORK_" + run }

// WorkSubject is where the scheduler publishes PromptGroups.
func WorkSubject(run string) string { return "rollout.work." + run }

// TrajStream is the name of a run's trajectory stream.
func TrajStream(run string) string { return "TRAJ_" + run }

// TrajSubject is where workers publish TrajectoryBatches.
func TrajSubject(run string) string { return "rollout.traj." + run }

// EventSubject is where everybody publishes EventBatches; an empty run gives MeshEvents.
func EventSubject(run string) string {
	if run == "" {
		return MeshEvents
	}
	return "rollout.events." + run
}

// work: each group goes to one worker and leaves the stream at its ack. The scheduler bounds what is in it.
func work(run string, replicas int) (jetstream.StreamConfig, jetstream.ConsumerConfig) {
	return jetstream.StreamConfig{
			Name:        WorkStream(run),
			Description: "prompt groups of " + run,
			Subjects:    []string{WorkSubject(run)},
			Retention:   jetstream.WorkQueuePolicy,
			Storage:     jetstream.FileStorage,
			Discard:     jetstream.DiscardNew,
			Duplicates:  dedup,
			AllowDirect: true,
			Replicas:    replicas,
		}, jetstream.ConsumerConfig{
			Durable:       WorkersConsumer,
			AckPolicy:     jetstream.AckExplicitPolicy,
			AckWait:       workAckWait,
			MaxDeliver:    -1, // the scheduler decides when to give a group up, with a typed reason
			MaxAckPending: maxAckPending,
			MaxWaiting:    4096, // pulls waiting at a time: one a worker and some
		}
}

// traj: a batch leaves the stream when the buffer has made it durable in the run's tier.
func traj(run string, replicas int) (jetstream.StreamConfig, jetstream.ConsumerConfig) {
	return jetstream.StreamConfig{
			Name:        TrajStream(run),
			Description: "trajectories of " + run,
			Subjects:    []string{TrajSubject(run)},
			Retention:   jetstream.WorkQueuePolicy,
			Storage:     jetstream.FileStorage,
			Discard:     jetstream.DiscardNew,
			Duplicates:  dedup,
			AllowDirect: true,
			Replicas:    replicas,
		}, jetstream.ConsumerConfig{
			Durable:       BufferConsumer,
			AckPolicy:     jetstream.AckExplicitPolicy,
			AckWait:       trajAckWait,
			MaxDeliver:    -1,
			MaxAckPending: maxAckPending,
		}
}

// events: kept by age and size, so that one slow reader holds nobody up.
func events(replicas int) (jetstream.StreamConfig, jetstream.ConsumerConfig) {
	return jetstream.StreamConfig{
			Name:        EventStream,
			Description: "events of all runs",
			Subjects:    []string{"rollout.events.>"},
			Retention:   jetstream.LimitsPolicy,
			Storage:     jetstream.FileStorage,
			Discard:     jetstream.DiscardOld,
			MaxAge:      eventsMaxAge,
			MaxBytes:    eventsMaxBytes,
			Duplicates:  dedup,
			AllowDirect: true,
			Replicas:    replicas,
		}, jetstream.ConsumerConfig{
			Durable:       StorageConsumer,
			AckPolicy:     jetstream.AckExplicitPolicy,
			AckWait:       eventAckWait,
			MaxDeliver:    -1,
			MaxAckPending: maxAckPending,
		}
}

// Replicas is how many copies of each stream there are to be: as configured, else maxReplicas in a cluster and one elsewhere. The
// consumers follow their streams.
func (b *Bus) Replicas() int {
	switch {
	case b.replicas > 0:
		return b.replicas
	case b.nc.ConnectedClusterName() == "":
		return 1
	}
	return min(maxReplicas, max(1, len(b.nc.Servers())))
}

// EnsureRun makes the WORK and TRAJ streams of a run and their consumers, or brings them to the settings above; what is in them
// stays. Safe to call again and from several processes.
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

// EnsureEvents makes the EVENTS stream and its consumer.
func (b *Bus) EnsureEvents(ctx context.Context) error {
	stream, consumer := events(b.Replicas())
	return b.ensure(ctx, stream, consumer)
}

// Try makes a stream under another name, as large as the one of the events where that is not there yet, stores a message in it and
// removes it: what a run will ask of the servers. ErrFull and ErrLimits say that they refuse.
func (b *Bus) Try(ctx context.Context) error {
	name := "DOCTOR_" + rand.Text()
	s, c := events(b.Replicas())
	s.Name, s.Description, s.Subjects = name, "made and removed by `rollout doctor`", []string{"rollout.doctor." + name}
	if _, err := b.stream(ctx, EventStream); err == nil {
		s.MaxBytes = 0 // the events have their room
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = b.js.DeleteStream(ctx, name)
	}()
	if err := b.ensure(ctx, s, c); err != nil {
		return err
	}
	_, err := b.js.Publish(ctx, s.Subjects[0], make([]byte, tried))
	return mapError(err)
}

// tried is the size of the message that Try stores: that of a batch of samples.
const tried = 1 << 20

// DeleteRun removes the streams of a run with all that is in them. What is not there is no error.
func (b *Bus) DeleteRun(ctx context.Context, run string) error {
	if err := checkRun(run); err != nil {
		return err
	}
	for _, name := range []string{WorkStream(run), TrajStream(run)} {
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
	s, err := b.stream(ctx, WorkStream(run))
	if err != nil {
		return 0, fmt.Errorf("mark the work of %s: %w", run, mapError(err))
	}
	return s.CachedInfo().State.LastSeq + 1, nil
}

// Runs lists the runs that have streams, in no order.
func (b *Bus) Runs(ctx context.Context) ([]string, error) {
	names, err := ask(ctx, func(ctx context.Context) ([]string, error) {
		listed := b.js.StreamNames(ctx)
		var names []string
		for name := range listed.Name() {
			names = append(names, name)
		}
		return names, listed.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("list the streams of runs: %w", mapError(err))
	}
	runs := map[string]bool{}
	for _, name := range names {
		for _, prefix := range []string{WorkStream(""), TrajStream("")} {
			if run, ok := strings.CutPrefix(name, prefix); ok {
				runs[run] = true
			}
		}
	}
	return slices.Collect(maps.Keys(runs)), nil
}

// PurgeWork drops the work items of a run before a mark that no worker has acked, as when a run is cancelled. Who takes the mark, then
// makes sure that nobody else conducts the run, then purges, drops nobody else's items however long it stood still in between.
func (b *Bus) PurgeWork(ctx context.Context, run string, before uint64) error {
	if err := checkRun(run); err != nil {
		return err
	}
	s, err := b.stream(ctx, WorkStream(run))
	if err != nil {
		return fmt.Errorf("purge work of %s: %w", run, mapError(err))
	}
	until := jetstream.WithPurgeSequence(max(before, 1)) // 0 would mean all
	if err := order(ctx, func(ctx context.Context) error { return s.Purge(ctx, until) }); err != nil {
		return fmt.Errorf("purge work of %s: %w", run, mapError(err))
	}
	return nil
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
