package controller

import "context"

// Store keeps drives.
type Store interface {
	// Save writes a drive, by its run. Durable when it returns. ErrStale where a newer incarnation of the run is there.
	Save(ctx context.Context, d *Drive) error
	// Get returns the drive of a run. ErrNotFound.
	Get(ctx context.Context, run string) (*Drive, error)
	// Active returns the drives to go on with, by run.
	Active(ctx context.Context) ([]*Drive, error)
}
