package controller

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// ErrNotTraining refuses a snapshot of a run that commits no further step.
var ErrNotTraining = rpcerr.New(codes.FailedPrecondition, "RUN_NOT_TRAINING", "the run commits no further step").
	Fix("its training states are in `rollout snapshot list RUN`; snapshots of the other kinds are taken while a run trains")

// cuts are the snapshots that clients ask for while a run trains. Safe for concurrent use.
type cuts struct {
	mu      sync.Mutex
	waiting []*cut
}

// cut is one request, answered once.
type cut struct {
	kinds []snapshotv1.SnapshotKind
	name  string
	done  chan struct{} // closed when made or err is set
	made  []*snapshotv1.Snapshot
	err   error
}

func (c *cuts) add(kinds []snapshotv1.SnapshotKind, name string) *cut {
	asked := &cut{kinds: kinds, name: name, done: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = append(c.waiting, asked)
	return asked
}

// cancel removes a request that is not being answered.
func (c *cuts) cancel(asked *cut) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = slices.DeleteFunc(c.waiting, func(other *cut) bool { return other == asked })
}

// first returns the oldest request; nil without one.
func (c *cuts) first() *cut {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waiting) == 0 {
		return nil
	}
	return c.waiting[0]
}

// CutRun implements the contract.
func (s *Server) CutRun(ctx context.Context, req *learnerv1.CutRunRequest) (*learnerv1.CutRunResponse, error) {
	s.mu.Lock()
	d := s.drives[req.GetRunId()]
	s.mu.Unlock()
	if d == nil || ended(d.progress.phase()) {
		return nil, ErrNotTraining.With("run", req.GetRunId())
	}
	asked := d.cuts.add(req.GetKinds(), req.GetName())
	defer d.cuts.cancel(asked)
	select {
	case <-asked.done:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-d.done:
		if !closed(asked.done) {
			return nil, ErrNotTraining.With("run", req.GetRunId())
		}
	}
	return &learnerv1.CutRunResponse{Snapshots: asked.made}, asked.err
}

// cut answers the clients that asked for snapshots, at a committed step, and reports whether there
// were any. If one cannot be made, the client gets the error and the run continues.
func (s *snapshotter) cut(ctx context.Context, step uint64) (done bool, err error) {
	for asked := s.cuts.first(); asked != nil; asked = s.cuts.first() {
		made, err := s.make(ctx, step, asked)
		if ctx.Err() != nil { // the next session answers it
			return true, err
		}
		if err != nil {
			s.log.WarnContext(ctx, "the requested snapshots were not made: "+rpcerr.Text(err), "step", step)
		}
		asked.made, asked.err = made, err
		s.cuts.cancel(asked)
		close(asked.done)
		done = true
	}
	return done, nil
}

// make makes the snapshots of a request: one training state, and a manifest of it for each kind.
func (s *snapshotter) make(ctx context.Context, step uint64, asked *cut) (made []*snapshotv1.Snapshot, err error) {
	dir := newScratch(s.directory, s.fence).newDir(fmt.Sprintf("cut-%06d", step))
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	state, err := s.state(ctx, step, dir)
	if err != nil {
		return nil, err
	}
	for _, kind := range asked.kinds {
		s.progress.waitFor(service("snapshot", "snapshot to store the files"))
		manifest := state(kind)
		manifest.Name = asked.name
		created, err := call(ctx, s.retries, "snapshot", s.service.CreateSnapshot, &snapshotv1.CreateSnapshotRequest{
			Snapshot: manifest, Directory: dir, Capture: true, Fence: s.fence,
		})
		if err != nil {
			return nil, err
		}
		made = append(made, created.GetSnapshot())
	}
	return made, nil
}
