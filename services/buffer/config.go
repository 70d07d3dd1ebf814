// Package buffer is the service that owns the ledger of trajectories: what arrived, which step
// consumed it, and with which weights.
//
//	buffer    the gRPC edge, the runs that are open, leases, and payloads
//	ingest    takes trajectories from the run's stream and from puts, and makes them durable in groups
//	ledger    decides: what is accepted, which groups a step takes, when it is committed
//	segment   files of payloads, and copies of them in a bucket
//	sqlstore  the ledger's rows in SQLite or PostgreSQL
//
// buffer imports all of them, ingest imports ledger and segment, and ledger and segment import none
// of them.
//
// Each run has its own lock, its own goroutines, and its own failure: a run whose ledger cannot be
// opened is retried, and neither it nor a run whose bucket is slow delays the others.
package buffer

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"

	"google.golang.org/grpc"

	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/buffer/ingest"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// Durability is what an answer to a put, an ack to the stream, and a commit survive.
type Durability int

const (
	// Power: payloads and ledger rows survive a power cut. Each group commit costs a sync of the
	// segment and one of the database.
	Power Durability = iota
	// Process: they survive the death of every process, also by SIGKILL. A power cut or a kernel
	// crash loses the last seconds.
	Process
)

// Config is what an operator sets.
type Config struct {
	Segments     string // folder of the segments, with a subfolder per run
	SegmentBytes uint64 // size at which a segment is followed by the next one; 0: 64 MiB
	Durability   Durability
	FetchBytes   uint64 // about how many bytes of arriving payloads all runs together hold in memory; 0: 64 MiB
	ReserveBytes uint64 // free bytes of the disk below which nothing is ingested; 0: a tenth of the disk, at most 1 GiB
}

// folder of a run's segments.
func (c *Config) folder(run string) string { return filepath.Join(c.Segments, run) }

// Deps are the collaborators of the service.
type Deps struct {
	Store     ledger.Store
	Bus       ingest.Source // nil: only puts are ingested
	Epoch     uint64        // of the lease of this service
	Artifacts Artifacts     // nil: payloads in the storage service cannot be read
	Blobs     segment.Blobs // where payloads are durable; nil: on the local disk
	Events    ingest.Events // nil: events are discarded
	Log       *slog.Logger
	Datasync  func(*os.File) error // makes a segment durable; nil: fdatasync
}

// Artifacts downloads and deletes payloads that were too large for a message;
// storagev1.ArtifactServiceClient is one.
type Artifacts interface {
	DeleteArtifacts(ctx context.Context, in *storagev1.DeleteArtifactsRequest, opts ...grpc.CallOption) (*storagev1.DeleteArtifactsResponse, error)
	GetArtifact(ctx context.Context, in *storagev1.GetArtifactRequest, opts ...grpc.CallOption) (grpc.ServerStreamingClient[storagev1.GetArtifactResponse], error)
}

type noEvents struct{}

func (noEvents) Emit(*eventv1.Event) {}

// complete validates the config and fills in defaults.
func (c *Config) complete(d *Deps) error {
	if c.Segments == "" {
		return errors.New("buffer: Config.Segments is empty, expected the folder of the segments")
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
