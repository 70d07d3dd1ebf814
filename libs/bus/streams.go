package bus

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollout-rl/rollout/proto/gen/names"
)

// The names and settings of every stream and consumer of the project stand in this file and nowhere else.
const (
	// MaxPayload is the size of the largest message, in bytes. Payloads are inline up to 256 KiB and blob references above that;
	// a message carries some groups of them.
	MaxPayload = 8 << 20

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

// EventSubject is the subject of a run's EventBatches, or names.MeshEvents for an empty run.
func EventSubject(run string) string {
	if run == "" {
		return names.MeshEvents
	}
	return names.RunEventSubject(run)
}

// work: each group goes to one worker and leaves the stream at its ack. The scheduler bounds what is in it.
func work(run string, replicas int) (jetstream.StreamConfig, jetstream.ConsumerConfig) {
	return jetstream.StreamConfig{
			Name:        names.WorkStream(run),
			Description: "prompt groups of " + run,
			Subjects:    []string{names.WorkSubject(run)},
			Retention:   jetstream.WorkQueuePolicy,
			Storage:     jetstream.FileStorage,
			Discard:     jetstream.DiscardNew,
			Duplicates:  dedup,
			AllowDirect: true,
			Replicas:    replicas,
		}, jetstream.ConsumerConfig{
			Durable:       names.WorkersConsumer,
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
			Name:        names.TrajStream(run),
			Description: "trajectories of " + run,
			Subjects:    []string{names.TrajSubject(run)},
			Retention:   jetstream.WorkQueuePolicy,
			Storage:     jetstream.FileStorage,
			Discard:     jetstream.DiscardNew,
			Duplicates:  dedup,
			AllowDirect: true,
			Replicas:    replicas,
		}, jetstream.ConsumerConfig{
			Durable:       names.BufferConsumer,
			AckPolicy:     jetstream.AckExplicitPolicy,
			AckWait:       trajAckWait,
			MaxDeliver:    -1,
			MaxAckPending: maxAckPending,
		}
}

// events: kept by age and size, so that one slow reader holds nobody up.
func events(replicas int) (jetstream.StreamConfig, jetstream.ConsumerConfig) {
	return jetstream.StreamConfig{
			Name:        names.EventStream,
			Description: "events of all runs",
			Subjects:    []string{names.EventSubjects},
			Retention:   jetstream.LimitsPolicy,
			Storage:     jetstream.FileStorage,
			Discard:     jetstream.DiscardOld,
			MaxAge:      eventsMaxAge,
			MaxBytes:    eventsMaxBytes,
			Duplicates:  dedup,
			AllowDirect: true,
			Replicas:    replicas,
		}, jetstream.ConsumerConfig{
			Durable:       names.StorageConsumer,
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

// Try makes a stream under another name, as large as the one of the events where that is not there yet, stores a message in it and
// removes it: what a run will ask of the servers. ErrFull and ErrLimits say that they refuse.
func (b *Bus) Try(ctx context.Context) error {
	token := rand.Text()
	name := names.DoctorStream(token)
	s, c := events(b.Replicas())
	s.Name, s.Description, s.Subjects = name, "made and removed by `rollout doctor`", []string{names.DoctorSubject(token)}
	if _, err := b.stream(ctx, names.EventStream); err == nil {
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
