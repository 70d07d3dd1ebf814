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

// patience bounds how long a drive that is asked to stop waits for rewards, environments, and
// tools: their calls may never end.
type patience struct {
	draining <-chan struct{}
	grace    time.Duration
}

// with returns a context that ends with ctx, or a grace period after the drive is asked to stop,
// with the cause errUnsettled. end releases it.
func (p patience) with(ctx context.Context) (patient context.Context, end func()) {
	patient, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-patient.Done():
			return
		case <-p.draining:
		}
		if sleep(patient, p.grace); patient.Err() == nil {
			cancel(errUnsettled)
		}
	}()
	return patient, func() { cancel(nil) }
}

// ended replaces an error by errUnsettled if the grace period was over.
func (p patience) ended(patient context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(patient), errUnsettled) {
		return errUnsettled
	}
	return err
}
