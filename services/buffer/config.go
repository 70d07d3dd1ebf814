package buffer

import (
	"context"
	"errors"
	"log/slog"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/bus"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Durability is what an answer to a put, an ack to the stream and a commit survive.
type Durability int

const (
	// Power: payloads and ledger rows survive a power cut; each group commit costs a sync of the segment.
	Power Durability = iota
	// Process: they survive the death of every process, by SIGKILL too; a power cut or a crash of the kernel takes the last seconds.
	Process
)

// Config is what an operator sets.
type Config struct {
	Segments     string // folder of the segments, one folder a run below it
	SegmentBytes uint64 // a segment this long is followed by the next; 0: 64 MiB, small against a disk and large against an fsync
	Durability   Durability
	FetchBytes   uint64 // about how much of what comes is held in memory at a time, by all runs together; 0: 64 MiB
	ReserveBytes uint64 // what stays free of the disk of the segments: below that nothing is ingested; 0: a tenth of the disk, at most 1 GiB
}

// Deps is what the service needs of others.
type Deps struct {
	Store     Store
	Bus       Bus       // nil: nothing is ingested
	Artifacts Artifacts // nil: payloads by reference can't be streamed
	Blobs     Blobs     // where payloads are durable before they are acked; nil: the local disk, with an fsync
	Events    Events    // nil discards
	Log       *slog.Logger
}

// Bus is where trajectories come from; *bus.Bus is one.
type Bus interface {
	Trajectories(ctx context.Context, run string) (*bus.Consumer, error)
}

// Artifacts fetches payloads that were too large for a message; storagev1.ArtifactServiceClient is one.
type Artifacts interface {
	GetArtifact(ctx context.Context, in *storagev1.GetArtifactRequest, opts ...grpc.CallOption) (grpc.ServerStreamingClient[storagev1.GetArtifactResponse], error)
}

// Events takes events; Emit never blocks and fills in id and time. *telemetry.Events is one. The logger's
// records set telemetry.AttrEvent to false, so that no event is stored twice.
type Events interface {
	Emit(event *eventv1.Event)
}

type noEvents struct{}

func (noEvents) Emit(*eventv1.Event) {}

// complete checks and fills in what is not set.
func (c *Config) complete(d *Deps) error {
	if c.Segments == "" {
		return errors.New("buffer: Config.Segments must name the folder of the segments")
	}
	if d.Store == nil {
		return errors.New("buffer: Deps.Store is missing")
	}
	if c.SegmentBytes == 0 {
		c.SegmentBytes = 64 << 20
	}
	if c.FetchBytes == 0 {
		c.FetchBytes = 64 << 20
	}
	if d.Events == nil {
		d.Events = noEvents{}
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}
