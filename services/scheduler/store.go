package scheduler

import (
	"context"

	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Store stores runs and their cursors. Writes are durable when the method returns. Implementations
// pass storetest.
type Store interface {
	Reader
	// Create records a run with its cursor. If an earlier run was created with the same key, it
	// returns that run.
	Create(ctx context.Context, run *Run, key string, cursor Cursor) (*Run, error)
	// Update reads a run, applies change, and writes it, in one transaction. An error of change is
	// returned and nothing is written. ErrNotFound.
	Update(ctx context.Context, id string, change func(*Run) error) (*Run, error)
	// Advance moves the cursor from one position to a later one. Idempotent. ErrCursor if the cursor
	// is at neither.
	Advance(ctx context.Context, id string, from, to uint64) error
	// KeepQueues stores the queues of a run, for the time when it is not active.
	KeepQueues(ctx context.Context, id string, q *runv1.Queues) error
	// Admit refuses a report that a former leader decided. fence.ErrFenced.
	Admit(ctx context.Context, id string, by *fencev1.Fence) error
	// Delete deletes a run with its cursor. An unknown run is no error.
	Delete(ctx context.Context, id string) error
}

// Reader reads runs.
type Reader interface {
	// Get returns a run. ErrNotFound.
	Get(ctx context.Context, id string) (*Run, error)
	// Resolve finds a run by id, by a unique prefix of an id, or the newest by name; with a project
	// only among its runs. ErrNotFound, ErrAmbiguous.
	Resolve(ctx context.Context, project *string, ref string) (*Run, error)
	// ByKey finds the run that was created with an idempotency key. ErrNotFound.
	ByKey(ctx context.Context, key string) (*Run, error)
	// List returns runs, newest first (by id).
	List(ctx context.Context, f Filter) ([]*Run, error)
	// Cursor returns the cursor of a run. ErrNotFound.
	Cursor(ctx context.Context, id string) (Cursor, error)
	// Queues returns the queues that KeepQueues stored last, or an empty message. ErrNotFound.
	Queues(ctx context.Context, id string) (*runv1.Queues, error)
}

// Cursor is the position of a run in its dataset.
type Cursor struct {
	Position  uint64 // next position to issue
	First     uint64 // first position of the run
	FirstStep uint64 // steps before the run, from its snapshot
}

// Filter selects runs; zero fields select all.
type Filter struct {
	States  []State
	Project *string // nil: of all projects
	After   string  // id after which the list continues
	Limit   int     // 0: all
}
