package buffer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/telemetry"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
)

const (
	unusedPage  = 256             // payloads that are deleted at a time
	unusedEvery = 5 * time.Second // interval at which marks are looked for
)

// cleaner deletes the payloads in the storage service that are marked as unused, of all runs. A
// deletion that fails is tried again.
type cleaner struct {
	store     ledger.Store
	artifacts Artifacts // nil: not reachable
	fence     *fencev1.Fence
	log       *slog.Logger
	wake      chan struct{}
}

func newCleaner(deps Deps) *cleaner {
	return &cleaner{store: deps.Store, artifacts: deps.Artifacts, fence: &fencev1.Fence{Role: names.BufferService, LeaderEpoch: deps.Epoch}, log: deps.Log, wake: make(chan struct{}, 1)}
}

// soon makes serve look for marks now.
func (c *cleaner) soon() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// serve deletes until ctx ends.
func (c *cleaner) serve(ctx context.Context) {
	if c.artifacts == nil {
		return
	}
	tick := time.NewTicker(unusedEvery)
	defer tick.Stop()
	for {
		if err := c.all(ctx); err != nil && ctx.Err() == nil {
			c.log.WarnContext(ctx, "unused payloads could not be deleted, which is retried", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-c.wake:
		case <-tick.C:
		}
	}
}

func (c *cleaner) all(ctx context.Context) error {
	runs, err := c.store.WithUnused(ctx)
	for _, run := range runs {
		if failed := c.run(ctx, run); failed != nil {
			err = errors.Join(err, fmt.Errorf("payloads of %s: %w", run, failed))
		}
	}
	return err
}

// run deletes the unused payloads of one run. A payload that a sample still needs is only unmarked:
// it arrived twice.
func (c *cleaner) run(ctx context.Context, run string) error {
	for {
		var unused, needed []string
		err := c.store.View(ctx, run, func(r ledger.Reader) (err error) {
			unused, needed, err = r.Unused(ctx, unusedPage)
			return err
		})
		if err != nil || len(unused)+len(needed) == 0 {
			return err
		}
		if err := c.delete(ctx, run, unused); err != nil {
			return err
		}
		err = c.store.Update(ctx, run, func(tx ledger.Tx) error {
			_, still, err := tx.Unused(ctx, unusedPage) // a step may have been trimmed since
			if err != nil {
				return err
			}
			freed := func(ref string) bool { return !slices.Contains(still, ref) }
			return tx.Forget(ctx, append(slices.Clone(unused), slices.DeleteFunc(slices.Clone(needed), freed)...))
		})
		if err != nil {
			return err
		}
	}
}

// delete deletes artifacts that were stored for the run. A worker chooses what it names, so what is
// not a content id is skipped.
func (c *cleaner) delete(ctx context.Context, run string, refs []string) error {
	var contents []string
	for _, ref := range refs {
		if id.ValidContent(ref) {
			contents = append(contents, ref)
		}
	}
	if len(contents) == 0 {
		return nil
	}
	_, err := c.artifacts.DeleteArtifacts(ctx, &storagev1.DeleteArtifactsRequest{ContentIds: contents, RunId: run, Fence: c.fence})
	return err
}

// DeleteRun implements the contract. The storage service deletes the payloads that were too large
// for a message, with the other artifacts of the run.
func (s *Server) DeleteRun(ctx context.Context, req *bufferv1.DeleteRunRequest) (*bufferv1.DeleteRunResponse, error) {
	r, done, err := s.runs.use(req.GetRunId())
	if err != nil {
		return nil, err
	}
	defer done()
	if err := s.store.Bury(ctx, r.id, req.GetFence()); err != nil {
		return nil, err
	}
	err = r.Update(ctx, func(tx ledger.Tx) error { tx.Ledger().Closed = true; return nil })
	if err != nil && !errors.Is(err, ledger.ErrNoLedger) {
		return nil, err
	}
	r.stop(ledger.ErrClosed.With("run", r.id), false)
	if err := os.RemoveAll(s.cfg.folder(r.id)); err != nil {
		return nil, fmt.Errorf("delete the segments of %s: %w", r.id, err)
	}
	if bucket := s.payloads.bucket(r.id); bucket != nil {
		if err := bucket.DeleteAll(ctx); err != nil {
			return nil, err
		}
	}
	crashpoint.Here("buffer/emptied") // payloads are deleted, the ledger exists
	if err := s.store.Delete(ctx, r.id); err != nil {
		return nil, err
	}
	s.runs.deps.Log.InfoContext(ctx, "the ledger was deleted", telemetry.AttrRun, r.id, telemetry.AttrEvent, false)
	return &bufferv1.DeleteRunResponse{}, nil
}
