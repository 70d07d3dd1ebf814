package controller

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// delivery moves the inference workers from one version of the weights to the next. Only the
// goroutine of the drive uses it.
type delivery struct {
	settings
	fleet    *fleet
	progress *progress
	events   *reporter
	now      func() time.Time

	newest  *weightsv1.WeightsManifest // published last; nil before the first
	lineage uint32                     // of the weights that the learner has
}

// announce lets the workers begin to load m, before deliver makes m the newest weights.
func (d *delivery) announce(ctx context.Context, m *weightsv1.WeightsManifest) {
	if d.generates() {
		d.fleet.setWanted(ctx, m)
	}
}

// deliver makes m the newest weights and waits until the inference workers have loaded them.
func (d *delivery) deliver(ctx context.Context, m *weightsv1.WeightsManifest) error {
	d.newest = m
	d.progress.update(func(now *learnerv1.Progress) { now.Weights = m })
	if !d.generates() {
		return nil
	}
	from := d.now()
	d.progress.enter(delivering)
	workers, err := d.fleet.deliver(ctx, m, func(workers []string, reason string) {
		d.progress.waitFor(work(fmt.Sprintf("to load weights version %d%s", m.GetVersion(), reason), workers...))
	})
	if err != nil {
		return fmt.Errorf("deliver weights version %d: %w", m.GetVersion(), err)
	}
	d.events.delivered(m, workers, d.now().Sub(from).Seconds())
	return nil
}

// resume delivers the newest weights again. errNoSource if there are none, or their folder is gone.
func (d *delivery) resume(ctx context.Context) error {
	if d.newest == nil || missing(d.newest) {
		return errNoSource
	}
	return d.deliver(ctx, d.newest)
}

// checkSource returns errNoSource if the newest weights can't reach any worker.
func (d *delivery) checkSource() error { return d.fleet.checkSource(d.newest) }

// missing reports whether the folder of the weights is gone.
func missing(m *weightsv1.WeightsManifest) bool {
	_, err := os.Stat(m.GetDirectory())
	return errors.Is(err, os.ErrNotExist)
}
