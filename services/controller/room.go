package controller

import (
	"context"
	"fmt"
	"time"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// errNoRoom reports that the drive was asked to stop while it waited for space on the disk.
var errNoRoom = fmt.Errorf("%w: the disk is full", errDrained)

// Disk measures the disk of a run's folder. *disk.Reserve implements it.
type Disk interface {
	// Missing describes what is missing for a write of need bytes that what names, "" if nothing is.
	// failed: a write has failed for lack of space.
	Missing(need uint64, what string, failed bool) string
}

// stateFactor is how large a training state is at most before the first one was saved, as a
// multiple of the weights: weights and two moments of an optimizer, of the same type.
const stateFactor = 3

// room keeps a run from filling its disk: it waits for space before something large is written, and
// repeats what failed on a full disk. The goroutine of the drive uses it.
type room struct {
	disk     Disk
	progress *progress
	pause    time.Duration
	draining <-chan struct{}

	state uint64 // bytes of the newest training state; 0: unknown
}

// stateBytes is the size of the next training state.
func (r *room) stateBytes(newest *weightsv1.WeightsManifest) uint64 {
	if r.state > 0 {
		return r.state
	}
	return stateFactor * newest.GetBytes()
}

// waitForStep waits until there is space for the weights of the next step and for the next
// snapshot. stored waits for a snapshot that is being written, which may give space back.
func (r *room) waitForStep(ctx context.Context, newest *weightsv1.WeightsManifest, stored func(context.Context) error) error {
	const what = "the next step with the next snapshot"
	need := newest.GetBytes() + r.stateBytes(newest)
	if r.disk.Missing(need, what, false) != "" {
		if err := stored(ctx); err != nil {
			return err
		}
	}
	return r.wait(ctx, need, what)
}

// wait waits until there is space for a write of need bytes. errNoRoom if the drive is asked to
// stop in the meantime.
func (r *room) wait(ctx context.Context, need uint64, what string) error {
	for {
		missing := r.disk.Missing(need, what, false)
		if missing == "" {
			r.progress.stall("")
			return nil
		}
		if err := r.rest(ctx, missing, r.pause); err != nil {
			return err
		}
	}
}

// rest shows what is missing and waits a moment.
func (r *room) rest(ctx context.Context, missing string, pause time.Duration) error {
	r.progress.stall(missing)
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-r.draining:
		return errNoRoom
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// repeat calls write until it does not fail for lack of space. The run shows what is missing until
// the write succeeds, because a disk that has space for others may still refuse this write.
func repeat[T any](ctx context.Context, r *room, need uint64, what string, write func() (T, error)) (T, error) {
	pause := newBackoff(r.pause)
	for {
		out, err := write()
		if !rpcerr.DiskFull(err) || ctx.Err() != nil {
			r.progress.stall("")
			return out, err
		}
		r.disk.Missing(need, what, true)
		missing, next := rpcerr.Text(err), pause.next()
		for missing != "" {
			if err := r.rest(ctx, missing, next); err != nil {
				return out, err
			}
			missing, next = r.disk.Missing(need, what, false), r.pause
		}
	}
}
