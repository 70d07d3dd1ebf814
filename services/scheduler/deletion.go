package scheduler

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/telemetry"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// deletionEvery is the interval at which deletions that have failed are tried again.
const deletionEvery = 10 * time.Second

// deletion deletes runs in all services.
//
//	ended --DeleteRun--> DELETING, durable --> streams, ledger, drive, sessions, snapshots, folder, events --> record
//
// Each part is deleted by a call that may be repeated, and the record is deleted last. So after a
// crash the next leader finds the record and deletes the rest.
type deletion struct {
	Deps
	retention map[State]time.Duration
	keep      int // newest ended runs that stay; 0: all
	records   *records
	runs      *runs
	servings  *servings
	one       sync.Mutex // held while a run is deleted
}

// retentionEvery is the interval at which runs are deleted by age.
const retentionEvery = time.Hour

// serve finishes what an earlier process began or what has failed, and deletes runs by age and
// number, until ctx ends.
func (d *deletion) serve(ctx context.Context) {
	var swept time.Time
	for {
		if now := d.Now(); now.Sub(swept) >= retentionEvery {
			swept = now
			if err := errors.Join(d.sweep(ctx, now), d.unpin(ctx)); err != nil && ctx.Err() == nil {
				d.Log.WarnContext(ctx, "old runs or unused pins of snapshots could not be deleted, which is tried again in an hour", "error", err)
			}
		}
		err := d.sweepNumber(ctx)
		runs, failed := d.Store.List(ctx, Filter{States: []State{Deleting}})
		err = errors.Join(err, failed)
		for _, run := range runs {
			if _, failed := d.finish(ctx, run); failed != nil {
				err = errors.Join(err, fmt.Errorf("delete %s: %w", run.GetRunId(), failed))
			}
		}
		if err != nil && ctx.Err() == nil {
			d.Log.WarnContext(ctx, "a run could not be deleted, which is tried again", "error", err)
		}
		if retry.Sleep(ctx, deletionEvery) != nil {
			return
		}
	}
}

// sweep deletes the runs that ended too long ago. Those that another run needs stay.
func (d *deletion) sweep(ctx context.Context, now time.Time) error {
	var failed error
	for state, age := range d.retention {
		var old []string
		if err := d.each(ctx, func(run *Run) error {
			if run.GetState() == state && run.GetEndTime() != nil && now.Sub(run.GetEndTime().AsTime()) >= age {
				old = append(old, run.GetRunId())
			}
			return nil
		}, state); err != nil {
			return err
		}
		failed = errors.Join(failed, d.requestAll(ctx, old))
	}
	return failed
}

// unpin releases the snapshots that a run was to start from which was not recorded. A controller
// pins the healthy snapshot of its own run, so that a pin stays while the run may continue, and
// after a collapse.
func (d *deletion) unpin(ctx context.Context) error {
	var pinned []*snapshotv1.Snapshot
	for token := ""; ; {
		page, err := d.Snapshots.ListSnapshots(ctx, &snapshotv1.ListSnapshotsRequest{Pinned: true, PageToken: token})
		if err != nil {
			return fmt.Errorf("list the pinned snapshots: %w", err)
		}
		pinned = append(pinned, page.GetSnapshots()...)
		if token = page.GetNextPageToken(); token == "" {
			break
		}
	}
	if len(pinned) == 0 {
		return nil
	}
	d.runs.origins.Lock() // runs whose creation has pinned one of them are recorded, and no other is created
	defer d.runs.origins.Unlock()
	needed, err := d.origins(ctx, "")
	if err != nil {
		return err
	}
	controlled := map[string]bool{}
	if err := d.each(ctx, func(run *Run) error {
		state := run.GetState()
		controlled[run.GetRunId()] = active(state) || state == Interrupted || refusal.Health(run.GetReason())
		return nil
	}); err != nil {
		return err
	}
	for _, snap := range pinned {
		id := snap.GetSnapshotId()
		if needed[id] || controlled[snap.GetRunId()] {
			continue
		}
		if _, err := d.Snapshots.UnpinSnapshot(ctx, &snapshotv1.UnpinSnapshotRequest{SnapshotId: id, Fence: d.fence(0)}); err != nil && rpcerr.Code(err) != codes.NotFound {
			return fmt.Errorf("release snapshot %s: %w", id, err)
		}
	}
	return nil
}

// sweepNumber deletes the ended runs that are older than the newest ones that stay. An interrupted
// run waits to be resumed, and does not count.
func (d *deletion) sweepNumber(ctx context.Context) error {
	if d.keep <= 0 {
		return nil
	}
	newer := 0
	var old []string
	if err := d.each(ctx, func(run *Run) error { // newest first
		if newer++; newer > d.keep {
			old = append(old, run.GetRunId())
		}
		return nil
	}, Succeeded, Failed, Cancelled); err != nil {
		return err
	}
	return d.requestAll(ctx, old)
}

// requestAll deletes runs, except those that something needs.
func (d *deletion) requestAll(ctx context.Context, runs []string) (failed error) {
	for _, id := range runs {
		if _, err := d.request(ctx, id, false); err != nil && !errors.Is(err, ErrInUse) && !errors.Is(err, ErrActive) && !errors.Is(err, ErrNotFound) {
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// request deletes a run, or with dry only checks whether it may be deleted. ErrNotFound, ErrActive,
// ErrInUse.
func (d *deletion) request(ctx context.Context, runID string, dry bool) (*runv1.DeleteRunResponse, error) {
	run, err := d.Store.Get(ctx, runID)
	if errors.Is(err, ErrNotFound) {
		return nil, NotFound(runID)
	}
	if err != nil {
		return nil, err
	}
	if dry {
		if err := d.check(ctx, run); err != nil {
			return nil, err
		}
		kept, err := d.needed(ctx, run)
		return &runv1.DeleteRunResponse{Run: run, KeptSnapshots: kept}, err
	}
	marked, err := d.mark(ctx, run)
	if err != nil {
		return nil, err
	}
	kept, err := d.finish(ctx, marked)
	if err != nil {
		return nil, fmt.Errorf("delete %s; the deletion continues by itself: %w", runID, err)
	}
	return &runv1.DeleteRunResponse{Run: run, KeptSnapshots: kept}, nil
}

// mark records that a run is deleted, unless something needs it. No run is created in the meantime.
func (d *deletion) mark(ctx context.Context, run *Run) (*Run, error) {
	d.runs.origins.Lock()
	defer d.runs.origins.Unlock()
	if err := d.check(ctx, run); err != nil {
		return nil, err
	}
	marked, err := d.records.update(ctx, run.GetRunId(), func(r *Run) error {
		if r.GetState() == Deleting {
			return nil
		}
		if active(r.GetState()) { // it was resumed
			return stillActive(r)
		}
		return move(r, Deleting)
	})
	if err == nil { // not an event of the run, which would outlive it
		d.Log.InfoContext(ctx, "run is deleted", telemetry.AttrEvent, false, telemetry.AttrRun, run.GetRunId())
	}
	return marked, err
}

func stillActive(run *Run) error {
	return ErrActive.With("run", run.GetRunId()).With("state", run.GetState().String()).
		WithMessage("run %s is %s and cannot be deleted", run.GetRunId(), stateName(run.GetState())).
		Fix("cancel it first: `rollout runs cancel " + run.GetRunId() + "`")
}

// check returns ErrActive if a run is active, and ErrInUse if another run or a served model reads
// files of its folder.
func (d *deletion) check(ctx context.Context, run *Run) error {
	if active(run.GetState()) {
		return stillActive(run)
	}
	folder := d.runs.folder(run.GetRunId())
	inUse := func(who, path string) *rpcerr.Error {
		return ErrInUse.With("run", run.GetRunId()).With("path", path).
			WithMessage("run %s cannot be deleted: %s reads %s", run.GetRunId(), who, path)
	}
	if name, path := d.servings.reads(folder); name != "" {
		return inUse("the served model "+name, path).Fix("stop it first: `rollout serve stop " + name + "`")
	}
	return d.each(ctx, func(other *Run) error {
		if other.GetRunId() == run.GetRunId() || other.GetState() == Deleting {
			return nil
		}
		for _, in := range other.GetPlan().GetInputs() {
			if path := planformat.InputsOf(other.GetDirectory()).Locate(other.GetBaseDir(), in); within(path, folder) {
				return inUse("run "+other.GetRunId(), path).Fix("delete that run first: `rollout runs delete " + other.GetRunId() + "`")
			}
		}
		return nil
	})
}

// within reports whether a path is a folder or in it.
func within(path, folder string) bool {
	path = filepath.Clean(path)
	return path == folder || strings.HasPrefix(path, folder+string(filepath.Separator))
}

// listPage is the number of runs that each reads at a time.
const listPage = 500

// each calls fn with every run, or with those in some states.
func (d *deletion) each(ctx context.Context, fn func(*Run) error, states ...State) error {
	for after := ""; ; {
		runs, err := d.Store.List(ctx, Filter{States: states, After: after, Limit: listPage})
		if err != nil {
			return err
		}
		for _, run := range runs {
			if err := fn(run); err != nil {
				return err
			}
			after = run.GetRunId()
		}
		if len(runs) < listPage {
			return nil
		}
	}
}

// origins returns the snapshots that runs started from, without those of one run and of runs that
// are deleted.
func (d *deletion) origins(ctx context.Context, without string) (map[string]bool, error) {
	found := map[string]bool{}
	err := d.each(ctx, func(run *Run) error {
		if from := run.GetFromSnapshot(); from != "" && run.GetRunId() != without && run.GetState() != Deleting {
			found[from] = true
		}
		return nil
	})
	return found, err
}

// needed returns the snapshots of a run that other runs started from.
func (d *deletion) needed(ctx context.Context, run *Run) (kept []string, err error) {
	origins, err := d.origins(ctx, run.GetRunId())
	if err != nil {
		return nil, err
	}
	for _, id := range sorted(origins) {
		resp, err := d.Snapshots.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: id})
		if rpcerr.Code(err) == codes.NotFound {
			continue
		}
		if err != nil {
			return nil, err
		}
		if resp.GetSnapshot().GetRunId() == run.GetRunId() {
			kept = append(kept, id)
		}
	}
	return kept, nil
}

func sorted(set map[string]bool) []string {
	out := make([]string, 0, len(set))
	for name := range set {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// finish deletes everything of a run that is DELETING, and returns the snapshots that stay.
func (d *deletion) finish(ctx context.Context, run *Run) (kept []string, err error) {
	d.one.Lock()
	defer d.one.Unlock()
	id, by := run.GetRunId(), d.fence(run.GetIncarnation())
	if err := d.runs.conductors.gone(ctx, id); err != nil {
		return nil, err
	}
	// The streams first: the buffer must not ingest what arrives late.
	if err := d.Bus.DeleteRun(ctx, id); err != nil {
		return nil, err
	}
	crashpoint.Here("scheduler/deleting") // the run is DELETING, its ledger exists
	if _, err := d.Controller.DeleteRun(ctx, &learnerv1.DeleteRunRequest{RunId: id, Fence: by}); err != nil {
		return nil, fmt.Errorf("learner-controller: %w", err)
	}
	if _, err := d.Buffer.DeleteRun(ctx, &bufferv1.DeleteRunRequest{RunId: id, Fence: by}); err != nil {
		return nil, fmt.Errorf("buffer: %w", err)
	}
	if _, err := d.Sessions.DeleteRun(ctx, &gatewayv1.DeleteRunRequest{RunId: id, Fence: by}); err != nil {
		return nil, fmt.Errorf("rollout-gateway: %w", err)
	}
	if kept, err = d.snapshots(ctx, run); err != nil {
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	if err := d.files(id); err != nil {
		return nil, err
	}
	// The services may have sent events of the run until now.
	if err := errors.Join(d.Events.Flush(ctx), d.Bus.EventsStored(ctx)); err != nil {
		return nil, err
	}
	if _, err := d.EventLog.DeleteRun(ctx, &storagev1.DeleteRunRequest{RunId: id, Fence: by}); err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	crashpoint.Here("scheduler/deleted") // only the record is left
	return kept, d.Store.Delete(ctx, id)
}

// snapshots deletes the snapshots of a run that no other run started from, and the one that this
// run started from if its own run is deleted and no other run needs it.
func (d *deletion) snapshots(ctx context.Context, run *Run) (kept []string, err error) {
	d.runs.origins.Lock()
	defer d.runs.origins.Unlock()
	needed, err := d.origins(ctx, run.GetRunId())
	if err != nil {
		return nil, err
	}
	resp, err := d.Snapshots.DeleteRun(ctx, &snapshotv1.DeleteRunRequest{RunId: run.GetRunId(), Keep: sorted(needed), Fence: d.fence(run.GetIncarnation())})
	if err != nil {
		return nil, err
	}
	from := run.GetFromSnapshot()
	if from == "" || needed[from] {
		return resp.GetKept(), nil
	}
	got, err := d.Snapshots.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: from})
	if rpcerr.Code(err) == codes.NotFound {
		return resp.GetKept(), nil
	}
	if err != nil {
		return nil, err
	}
	if _, err := d.Snapshots.UnpinSnapshot(ctx, &snapshotv1.UnpinSnapshotRequest{SnapshotId: from, Fence: d.fence(0)}); err != nil && rpcerr.Code(err) != codes.NotFound {
		return nil, err
	}
	owner, err := d.Store.Get(ctx, got.GetSnapshot().GetRunId())
	if err == nil && owner.GetState() != Deleting {
		return resp.GetKept(), nil // it has the snapshot, within its retention
	}
	if err != nil && !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	if origin := got.GetSnapshot().GetOrigin(); err != nil && origin != nil && !origin.GetDeleted() {
		return resp.GetKept(), nil // it was imported, and a person deletes it
	}
	_, err = d.Snapshots.DeleteSnapshot(ctx, &snapshotv1.DeleteSnapshotRequest{SnapshotId: from, Fence: d.fence(0)})
	return resp.GetKept(), err
}

// sharedMemory is where learners write the weights of a run, in a folder of their user; see
// rollout_workers.weights.transfer.shared_memory.
const sharedMemory = "/dev/shm"

// files deletes the folder of a run, and what dead learners of it left in shared memory.
func (d *deletion) files(runID string) error {
	memory, err := filepath.Glob(filepath.Join(sharedMemory, fmt.Sprintf("rollout-%d", os.Getuid()), runID+"-*"))
	for _, folder := range append(memory, d.runs.folder(runID)) {
		err = errors.Join(err, os.RemoveAll(folder))
	}
	if err != nil {
		return fmt.Errorf("delete the folder of the run: %w", err)
	}
	return nil
}

// startable returns an error if a run may not start from a snapshot, because it is being deleted
// with its run. The snapshot of a deleted run exists as long as another run needs it. of is the
// plan of the snapshot's run, nil if it is not known.
func (s *runs) startable(ctx context.Context, snap *snapshotv1.Snapshot) (of *planv1.Plan, err error) {
	owner, err := s.Store.Get(ctx, snap.GetRunId())
	if err == nil && owner.GetState() == Deleting {
		return nil, ErrSnapshotKind.With("snapshot", snap.GetSnapshotId()).WithMessage("snapshot %s is deleted with its run %s", snap.GetSnapshotId(), snap.GetRunId()).
			Fix("`rollout snapshot list` shows other snapshots")
	}
	if of = snap.GetOrigin().GetPlan(); of == nil {
		of = owner.GetPlan()
	}
	if errors.Is(err, ErrNotFound) {
		return of, nil
	}
	return of, err
}
