package controller

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// errUnsettled reports that the drive was asked to stop while it waited for an evaluation that did
// not end. There is no snapshot after the evaluation began, so a resumed run makes the weights
// again and repeats it.
var errUnsettled = fmt.Errorf("%w: the evaluation in progress is abandoned", errDrained)

// leaves reports whether the drive was asked to stop and is between two steps, so that it can take
// a snapshot.
func leaves(err error) bool {
	return errors.Is(err, errDrained) && !errors.Is(err, errNoRoom) && !errors.Is(err, errUnsettled)
}

// drainLimit bounds how long a drive that is asked to stop waits for rewards, environments, and
// tools: their calls may never end.
type drainLimit struct {
	draining <-chan struct{}
	grace    time.Duration
}

// with returns a context that ends with ctx, or a grace period after the drive is asked to stop,
// with the cause errUnsettled. end releases it.
func (p drainLimit) with(ctx context.Context) (limited context.Context, end func()) {
	limited, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-limited.Done():
			return
		case <-p.draining:
		}
		if sleep(limited, p.grace); limited.Err() == nil {
			cancel(errUnsettled)
		}
	}()
	return limited, func() { cancel(nil) }
}

// ended replaces an error by errUnsettled if the grace period was over.
func (p drainLimit) ended(limited context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(limited), errUnsettled) {
		return errUnsettled
	}
	return err
}
