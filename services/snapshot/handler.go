package snapshot

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Handler is what the service does differently for each kind of snapshot. Export and import need
// nothing of a kind: a manifest names every file.
type Handler interface {
	// Capture writes what the kind stores of a run into a folder, and adds the files to its new
	// manifest, which has those of the training state. The run commits no step in the meantime.
	Capture(ctx context.Context, s *Snapshot, to Folder) error
	// Check adds a violation to bad for each field of a new manifest that the kind does not allow.
	Check(s *Snapshot, bad *rpcerr.Error) *rpcerr.Error
	// Verify returns what is wrong with a snapshot whose files have their digests.
	Verify(ctx context.Context, s *Snapshot, from Files) ([]*Flaw, error)
	// Restore creates a run that continues from a snapshot.
	Restore(ctx context.Context, s *Snapshot) (*runv1.Run, error)
}

// Flaw is damage in a file of a snapshot.
type Flaw = snapshotv1.SnapshotFlaw

type handlers map[Kind]Handler

// newHandlers is the table of the supported kinds.
func newHandlers(deps Deps) handlers {
	state := trainState{deps.Scheduler}
	ledger := bufferKind{trainState: state, buffer: deps.Buffer}
	return handlers{
		TrainState: state,
		Buffer:     ledger,
		Process:    processKind{trainState: state, processes: deps.Processes},
		Episodic:   episodicKind{bufferKind: ledger, store: deps.Store},
	}
}

// of returns the handler of a kind. ErrUnsupported lists the supported kinds.
func (h handlers) of(kind Kind) (Handler, error) {
	if found, ok := h[kind]; ok {
		return found, nil
	}
	var supported []string
	for _, k := range slices.Sorted(maps.Keys(h)) {
		supported = append(supported, kindName(k))
	}
	list := strings.Join(supported, ", ")
	return nil, ErrUnsupported.With("kind", kindName(kind)).With("supported", list).
		WithMessage("snapshots of kind %s are not supported", kindName(kind)).Fix("use a supported kind: " + list)
}

func kindName(kind Kind) string {
	return strings.ToLower(strings.TrimPrefix(kind.String(), "SNAPSHOT_KIND_"))
}

// trainState handles what a learner saves: weights, optimizer, schedule, and random states.
type trainState struct{ scheduler Scheduler }

// Capture implements Handler. The learner has written the files.
func (trainState) Capture(context.Context, *Snapshot, Folder) error { return nil }

// Verify implements Handler. The digests say everything.
func (trainState) Verify(context.Context, *Snapshot, Files) ([]*Flaw, error) { return nil, nil }

// Check implements Handler.
func (trainState) Check(s *Snapshot, bad *rpcerr.Error) *rpcerr.Error {
	if len(s.GetFiles()) == 0 {
		return bad.Field("snapshot.files", "must have at least one file")
	}
	return bad
}

// Restore implements Handler. The new run has the plan of the run that the snapshot belongs to.
func (t trainState) Restore(ctx context.Context, s *Snapshot) (*runv1.Run, error) {
	origin, err := originOf(ctx, t.scheduler, s)
	if err != nil {
		return nil, fmt.Errorf("find the plan of %s: %w", s.GetRunId(), err)
	}
	lock, err := id.CanonicalJSON(origin.GetPlan())
	if err != nil {
		return nil, fmt.Errorf("write the plan of %s: %w", s.GetRunId(), err)
	}
	made, err := t.scheduler.CreateRun(ctx, &runv1.CreateRunRequest{Lock: lock, BaseDir: origin.GetBaseDir(), FromSnapshot: s.GetSnapshotId()})
	if err == nil {
		return made.GetRun(), nil
	}
	if e, ok := rpcerr.From(err); ok && e.Reason() == "PLAN_INPUTS_CHANGED" {
		return nil, e.Fix("restore the inputs, or start the new run with the changed ones: `rollout snapshot restore " + s.GetSnapshotId() + " --accept-changes`")
	}
	return nil, fmt.Errorf("restore %s: %w", s.GetSnapshotId(), err)
}

// originOf returns what is known of the run of a snapshot: from the manifest of an imported one,
// else from the scheduler.
func originOf(ctx context.Context, runs Scheduler, s *Snapshot) (*snapshotv1.Origin, error) {
	if s.GetOrigin() != nil {
		return s.GetOrigin(), nil
	}
	got, err := runs.GetRun(ctx, &runv1.GetRunRequest{RunId: s.GetRunId()})
	run := got.GetStatus().GetRun()
	return &snapshotv1.Origin{Plan: run.GetPlan(), BaseDir: run.GetBaseDir(), Project: run.GetProject()}, err
}
