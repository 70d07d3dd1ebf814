package scheduler

import (
	"context"

	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Store keeps runs and their cursors. What a method wrote is durable when it returns. Implementations pass storetest.
type Store interface {
	Reader
	// Create records a run with its cursor. With a key that an earlier run was created with, that run is returned instead.
	Create(ctx context.Context, run *Run, key string, cursor Cursor) (*Run, error)
	// Update reads a run, lets change alter it and writes it, in one transaction; an error of change leaves it as it was and
	// comes back as it is. ErrNotFound.
	Update(ctx context.Context, id string, change func(*Run) error) (*Run, error)
	// Advance moves the cursor from one position to a later one. ErrCursor when it stands elsewhere.
	Advance(ctx context.Context, id string, from, to uint64) error
	// KeepQueues remembers the queues of a run that has no conductor any more.
	KeepQueues(ctx context.Context, id string, q *runv1.Queues) error
}

// Reader answers questions about runs.
type Reader interface {
	// Get returns a run. ErrNotFound.
	Get(ctx context.Context, id string) (*Run, error)
	// Resolve finds a run by id, by a unique prefix of an id, or the newest by name. ErrNotFound, ErrAmbiguous.
	Resolve(ctx context.Context, ref string) (*Run, error)
	// ByKey finds the run that was created with an idempotency key. ErrNotFound.
	ByKey(ctx context.Context, key string) (*Run, error)
	// List returns runs, newest first (by id).
	List(ctx context.Context, f Filter) ([]*Run, error)
	// Cursor returns the cursor of a run. ErrNotFound.
	Cursor(ctx context.Context, id string) (Cursor, error)
	// Queues returns what KeepQueues kept last, or an empty message. ErrNotFound.
	Queues(ctx context.Context, id string) (*runv1.Queues, error)
}

// Cursor is a run's place in its dataset.
type Cursor struct {
	Position  uint64 // next position to issue
	First     uint64 // first position of the run
	FirstStep uint64 // steps made before the run
}

// Filter narrows a list; zero fields do not.
type Filter struct {
	States []State
	After  string // id after which to go on
	Limit  int    // 0: all
}
