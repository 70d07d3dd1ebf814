package snapshot

import (
	"context"

	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Store keeps manifests. What a method wrote is durable when it returns. Implementations pass storetest.
type Store interface {
	Reader
	// Record keeps a manifest. A manifest of the same run, kind and step that is there already stays and is returned instead.
	Record(ctx context.Context, s *Snapshot) (*Snapshot, error)
	// Delete removes manifests; digests that they named become candidates. Unknown ids are no error.
	Delete(ctx context.Context, ids ...string) error
	// Pin keeps a manifest from retention: a run began from it. ErrNotFound.
	Pin(ctx context.Context, id string) error
	// Note makes digests candidates: a sweep may remove their artifacts unless a manifest names them by then.
	Note(ctx context.Context, digests []string) error
	// Forget takes digests off the candidates.
	Forget(ctx context.Context, digests []string) error
}

// Reader answers questions about manifests.
type Reader interface {
	// Get finds a manifest by id or a unique prefix of it. ErrNotFound, ErrAmbiguous.
	Get(ctx context.Context, idOrPrefix string) (*Snapshot, error)
	// Find finds the manifest of a run, kind and step. ErrNotFound.
	Find(ctx context.Context, run string, kind snapshotv1.SnapshotKind, step uint64) (*Snapshot, error)
	// List returns manifests, newest first (by id).
	List(ctx context.Context, f Filter) ([]*Snapshot, error)
	// Garbage returns the candidates that no manifest names, and those that one names.
	Garbage(ctx context.Context) (garbage, named []string, err error)
}

// Filter narrows a list; zero fields do not.
type Filter struct {
	Run   string
	Kind  snapshotv1.SnapshotKind
	After string // id after which to go on
	Limit int    // 0: all
	// Unpinned leaves out the manifests that were pinned.
	Unpinned bool
}
