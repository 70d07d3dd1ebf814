// Package storage stores artifacts by the digest of their content, events, and the metrics of
// events.
//
// Events arrive on the EVENTS stream or by AppendEvents. Each event id is stored once, so both may
// repeat an event. The metrics of `step.committed` and `eval.finished` become series by step. If a
// step is recorded twice, the newest value counts.
package storage

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Errors of the service, compared with errors.Is.
var (
	ErrNotFound = rpcerr.New(codes.NotFound, "ARTIFACT_NOT_FOUND", "no artifact has this content id")
	ErrCorrupt  = rpcerr.New(codes.DataLoss, "ARTIFACT_CORRUPT", "the bytes of the artifact do not match its content id")
	ErrMismatch = rpcerr.New(codes.FailedPrecondition, "ARTIFACT_MISMATCH", "the content of the file does not match the given content id")
	ErrNoFile   = rpcerr.New(codes.NotFound, "FILE_NOT_FOUND", "the file does not exist on the host of the storage service")
	ErrPath     = rpcerr.New(codes.InvalidArgument, "BAD_PATH", "a path on the host of the storage service must be absolute")
)

// Event is one record.
type Event = eventv1.Event

// Filter selects events. Its zero value selects all.
type Filter struct {
	Run      string
	Services []string // `inference-worker` also selects its workers, such as `inference-worker/inference-0`
	MinLevel eventv1.Level
	Since    time.Time
	Kinds    []string
	After    uint64 // sequence
	Before   uint64 // sequence; 0: no end
}

// MetricQuery selects points of the metrics of a run.
type MetricQuery struct {
	Run   string
	Names []string // empty: all
	From  uint64   // first step
	After *Point   // only points after it; nil: all
	Limit int      // largest number of points
}

// Point names a point of a metric.
type Point struct {
	Name string
	Step uint64
}

// Store keeps events, metrics, and the runs that artifacts belong to.
type Store interface {
	Owners
	// Append stores events in order and gives each a sequence number. It skips events whose id is
	// already stored and those of deleted runs, and returns how many were new. They survive a crash of
	// the process when it returns. Telemetry is stored as such, and does not count.
	Append(ctx context.Context, events []*Event) (int, error)
	// List returns at most limit events by sequence: the first, or with newest the last.
	List(ctx context.Context, f Filter, limit int, newest bool) ([]*Event, error)
	// Downsample summarizes the telemetry that is old enough for the next tier, one row of a worker in
	// a transaction. It continues where an interrupted one stopped.
	Downsample(ctx context.Context, now time.Time, tiers []Tier) error
	// Telemetry calls visit with the series of each worker of a run, at the resolutions of the tiers.
	Telemetry(ctx context.Context, f TelemetryFilter, tiers []Tier, visit func(TelemetrySeries) error) error
	// Series returns metrics by name and step, at most q.Limit points.
	Series(ctx context.Context, q MetricQuery) ([]*storagev1.Series, error)
	// DeleteBefore deletes the events before a time, in transactions of bounded size.
	DeleteBefore(ctx context.Context, before time.Time) error
	// DeleteRun deletes the events, metrics, and telemetry of a run, in transactions of bounded size.
	// From then on nothing is stored for the run. fence.ErrFenced.
	DeleteRun(ctx context.Context, run string, by *fencev1.Fence) error
	// Admit refuses a change that a former leader decided. run is "" for none. fence.ErrFenced,
	// fence.ErrDeleted.
	Admit(ctx context.Context, run string, by *fencev1.Fence) error
}

// Owners records for which runs an artifact was stored.
type Owners interface {
	// Own records that an artifact was stored for a run; "": for none. by is nil for those whom no one
	// replaces. fence.ErrFenced, fence.ErrDeleted; if the artifact was stored for nothing else, it
	// calls remove before, in the same transaction. remove may be nil.
	Own(ctx context.Context, run, digest string, by *fencev1.Fence, remove func() error) error
	// OwnersOf returns the runs that an artifact was stored for.
	OwnersOf(ctx context.Context, digest string) ([]string, error)
	// Owned returns digests that were stored for a run, at most limit.
	Owned(ctx context.Context, run string, limit int) ([]string, error)
	// Disown forgets that an artifact was stored for a run. If it was stored for no other run, it
	// calls remove before, in the same transaction. remove may be called more than once.
	// fence.ErrFenced.
	Disown(ctx context.Context, run, digest string, by *fencev1.Fence, remove func() error) error
}

// Measured reports whether the metrics of an event kind belong to its step.
func Measured(kind string) bool { return kind == "step.committed" || kind == "eval.finished" }
