package snapshot

import (
	"context"

	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
)

// Store keeps manifests. Writes are durable when a method returns. Implementations pass storetest.
type Store interface {
	Reader
	EpisodeStore
	// Record stores a manifest and returns it. If there is one with the same key, that one stays
	// and is returned instead. by as in Admit. fence.ErrDeleted.
	Record(ctx context.Context, s *Snapshot, by *fencev1.Fence) (*Snapshot, error)
	// Update replaces a manifest by one with the same id, key, and files. ErrNotFound.
	Update(ctx context.Context, s *Snapshot) error
	// Admit refuses a change that a former leader decided, of a run, or of none (""). A nil fence
	// stands for the service itself, or a person, and is admitted. fence.ErrFenced.
	Admit(ctx context.Context, run string, by *fencev1.Fence) error
	// Delete deletes manifests. Their ids and the digests that they name become candidates. It
	// ignores unknown ids. ErrInUse if one is pinned; then none is deleted. by as in Admit.
	Delete(ctx context.Context, by *fencev1.Fence, ids ...string) error
	// Pin exempts a manifest from retention, because a run started from it. ErrNotFound. by as in
	// Admit.
	Pin(ctx context.Context, id string, by *fencev1.Fence) error
	// Unpin ends the exemption. ErrNotFound. by as in Admit.
	Unpin(ctx context.Context, id string, by *fencev1.Fence) error
	// Note makes digests and ids of snapshots candidates: a sweep deletes the artifacts that no
	// manifest names, and the objects of manifests that do not exist.
	Note(ctx context.Context, names []string) error
	// Forget removes digests and ids from the candidates.
	Forget(ctx context.Context, names []string) error
}

// Reader reads manifests.
type Reader interface {
	// Get finds a manifest by its id or a unique prefix of the id. ErrNotFound, ErrAmbiguous.
	Get(ctx context.Context, idOrPrefix string) (*Snapshot, error)
	// Find finds a manifest by its key. ErrNotFound.
	Find(ctx context.Context, key Key) (*Snapshot, error)
	// List returns manifests, newest first (by id).
	List(ctx context.Context, f Filter) ([]*Snapshot, error)
	// Garbage returns the candidates that no manifest names and that are the id of none, and the
	// others.
	Garbage(ctx context.Context) (garbage, named []string, err error)
}

// Filter selects manifests. A zero field selects all.
type Filter struct {
	Run   string
	Kind  Kind
	After string // last id of the previous page
	Limit int    // 0: all
	// Unpinned omits pinned manifests.
	Unpinned bool
	// Pinned omits the others.
	Pinned bool
}
