package bus

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollout-rl/rollout/proto/gen/names"
)

// This file is the only place that configures streams and consumers.
const (
	// MaxPayload is the size of the largest message, in bytes. Payloads are inline up to 256 KiB and
	// blob references above that; a message carries some groups of them.
	MaxPayload = 8 << 20

	// workAckWait is how long a worker may be silent (it acks progress every second) before its items
	// are redelivered. Three missed acks and a margin: with less, a busy machine causes needless
	// redeliveries; with more, a dead worker keeps the learner waiting.
	workAckWait = 4 * time.Second
	// trajAckWait is how long samples wait for redelivery after a buffer that fetched them was killed.
	// Their step waits as long. A segment fsync and a ledger transaction take milliseconds; on a
	// slower disk the ledger drops the duplicate.
	trajAckWait = 4 * time.Second
	// eventAckWait is long because no step waits for events.
	eventAckWait = 30 * time.Second
	// maxAckPending bounds the unacked deliveries of a consumer. It is not the flow control (that is
	// the scheduler's staleness bound), so it is above every fleet's slots.
	maxAckPending = 1 << 16
	// Messages are not fsynced one by one (rolloutd sets EmbeddedOptions.NoSync; an external server by
	// default syncs every two minutes): lost messages are published again from the scheduler's cursor
	// and the buffer's ledger, and an fsync each would cost 0.7 ms, thirty times the message itself.
	// To make an ack survive the power cut of a single server set sync_interval: always on that
	// server; in a cluster the ack means that a majority of the replicas has the message.
	//
	// maxReplicas is the default number of replicas of each stream and consumer in a cluster. With
	// three, one node may fail; with more, each message costs more for little gain.
	maxReplicas = 3

	// dedup is how long the server remembers Nats-Msg-Id: it drops duplicates of a publish that was
	// retried after a reconnect. The ledger guarantees exactly-once without a time limit.
	dedup = 2 * time.Minute
	// The stream only transports events to storage, which owns the log. These limits bound what waits
	// for a storage service that is down.
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

// work configures a run's work stream. Each group goes to one worker and leaves the stream when
// acked. The scheduler bounds its size.
func work(run string, replicas int) (jetstream.StreamConfig, jetstream.ConsumerConfig) {
	return jetstream.StreamConfig{
			Name:        names.WorkStream(run),
			Description: "prompt groups of " + run,
			Subjects:    []string{names.WorkSubject(run), names.WorkSubject(run) + ".>"}, // WorkItem.Subject names the items of the scheduler
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
			MaxDeliver:    -1, // the scheduler abandons groups, with a typed reason
			MaxAckPending: maxAckPending,
			MaxWaiting:    4096, // concurrent pulls: one per worker and some spare
		}
}

// traj configures a run's trajectory stream. A batch leaves it when the buffer has made it durable
// in the run's tier.
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

// events configures the event stream. Messages expire by age and size, so that a slow reader does
// not block publishers.
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

// Replicas is the number of replicas of each stream: as configured, else maxReplicas in a cluster
// and one elsewhere. The consumers have as many as their streams.
func (b *Bus) Replicas() int {
	switch {
	case b.replicas > 0:
		return b.replicas
	case b.nc.ConnectedClusterName() == "":
		return 1
	}
	return min(maxReplicas, max(1, len(b.nc.Servers())))
}

// Try creates a temporary stream, as large as the event stream if that does not exist yet, stores a
// message in it, and deletes it, to test what a run needs from the servers. It returns ErrFull or
// ErrLimits if they refuse.
func (b *Bus) Try(ctx context.Context) error {
	token := rand.Text()
	name := names.DoctorStream(token)
	s, c := events(b.Replicas())
	s.Name, s.Description, s.Subjects = name, "made and removed by `rollout doctor`", []string{names.DoctorSubject(token)}
	if _, err := b.stream(ctx, names.EventStream); err == nil {
		s.MaxBytes = 0 // the event stream has its space already
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

// tried is the size of the message that Try stores, about that of a batch of samples.
const tried = 1 << 20
