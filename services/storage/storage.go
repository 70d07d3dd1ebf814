// Package storage keeps what a run leaves behind: artifacts under the digest of their content, events, and the metrics that
// events carry.
//
// Events arrive on the EVENTS stream or by AppendEvents; an event id is stored once, so that either may repeat itself.
// The numbers of `step.committed` and `eval.finished` become series by step: of a step recorded twice the newest counts.
package storage

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Errors of the service, compared with errors.Is.
var (
	ErrNotFound = rpcerr.New(codes.NotFound, "ARTIFACT_NOT_FOUND", "no artifact of this content id")
	ErrCorrupt  = rpcerr.New(codes.DataLoss, "ARTIFACT_CORRUPT", "the artifact's bytes do not have its content id")
	ErrMismatch = rpcerr.New(codes.FailedPrecondition, "ARTIFACT_MISMATCH", "the file is not the content that was announced")
	ErrNoFile   = rpcerr.New(codes.NotFound, "FILE_NOT_FOUND", "no such file on the storage's host")
	ErrPath     = rpcerr.New(codes.InvalidArgument, "BAD_PATH", "a path on the storage's host must be absolute")
)

// Event is one record.
type Event = eventv1.Event

// Filter narrows events; its zero value takes all.
type Filter struct {
	Run      string
	Services []string // a service's name takes its numbered workers too: `inference-worker` takes `inference-worker/inference-0`
	MinLevel eventv1.Level
	Since    time.Time
	Kinds    []string
	After    uint64 // sequence
}

// Store keeps events and metrics.
type Store interface {
	// Append stores events in order and gives each its sequence; those whose id is known are left out. It returns how many
	// were new. When it returns they survive the death of the process.
	Append(ctx context.Context, events []*Event) (int, error)
	// List returns at most limit events by sequence: the first, or with newest the last ones.
	List(ctx context.Context, f Filter, limit int, newest bool) ([]*Event, error)
	// Series returns the metrics of a run from a step on, by name; no names means all.
	Series(ctx context.Context, run string, names []string, from uint64) ([]*storagev1.Series, error)
}

// Measured reports whether an event's metrics are numbers of its step.
func Measured(kind string) bool { return kind == "step.committed" || kind == "eval.finished" }
