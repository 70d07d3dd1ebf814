package snapshot

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/proto/gen/names"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// service is the use cases. Its methods may be called from many goroutines.
type service struct {
	Deps
	// files is held for reading while artifacts are imported or exported, for writing while a sweep deletes some.
	files sync.RWMutex
}

// create takes the files of a folder into storage, records the manifest and applies retention.
func (s *service) create(ctx context.Context, want *Snapshot, dir string, keep int) (*Snapshot, error) {
	if err := check(want, dir); err != nil {
		return nil, err
	}
	first, err := s.Store.Find(ctx, want.GetRunId(), want.GetKind(), want.GetStep())
	if err == nil {
		return first, nil
	}
	if !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	snap, err := s.take(ctx, want, dir)
	if err != nil {
		return nil, err
	}
	s.Events.Emit(created(snap))
	if err := s.retain(ctx, snap, keep); err != nil {
		s.Log.WarnContext(ctx, "old snapshots stay", "run", snap.GetRunId(), "error", err)
	}
	return snap, nil
}

func (s *service) take(ctx context.Context, want *Snapshot, dir string) (*Snapshot, error) {
	s.files.RLock()
	defer s.files.RUnlock()
	if err := s.Store.Note(ctx, digests(want)); err != nil {
		return nil, err
	}
	crashpoint.Here("snapshot/noted") // its files are candidates of a sweep, not taken
	req := &storagev1.ImportArtifactsRequest{}
	for _, f := range want.GetFiles() {
		req.Files = append(req.Files, &storagev1.LocalFile{Path: filepath.Join(dir, filepath.FromSlash(f.GetPath())), ContentId: f.GetDigest()})
	}
	resp, err := s.Artifacts.ImportArtifacts(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("take the files of snapshot %s/%d: %w", want.GetRunId(), want.GetStep(), err)
	}
	crashpoint.Here("snapshot/imported") // files are taken, no manifest names them
	snap := proto.CloneOf(want)
	now := s.Now().UTC()
	snap.SnapshotId, snap.CreateTime, snap.Bytes = newID(now), timestamppb.New(now), 0
	for i, f := range snap.GetFiles() {
		if i >= len(resp.GetArtifacts()) || resp.GetArtifacts()[i].GetContentId() != f.GetDigest() {
			return nil, ErrMismatch.With("path", f.GetPath()).With("digest", f.GetDigest())
		}
		f.Bytes = resp.GetArtifacts()[i].GetBytes()
		snap.Bytes += f.GetBytes()
	}
	snap, err = s.Store.Record(ctx, snap)
	if err != nil {
		return nil, err
	}
	crashpoint.Here("snapshot/recorded")            // the manifest is there, its files are candidates still
	return snap, s.Store.Forget(ctx, digests(snap)) // of a twin that came first, what only we named stays a candidate
}

// retain deletes the snapshots of the same run and kind beyond the newest keep, by step. Those that another run began from stay.
func (s *service) retain(ctx context.Context, newest *Snapshot, keep int) error {
	if keep == 0 {
		return nil
	}
	all, err := s.Store.List(ctx, Filter{Run: newest.GetRunId(), Kind: newest.GetKind(), Unpinned: true})
	if err != nil || len(all) <= keep {
		return err
	}
	slices.SortFunc(all, func(a, b *Snapshot) int { return int(int64(b.GetStep()) - int64(a.GetStep())) })
	var old []string
	for _, snap := range all[keep:] {
		old = append(old, snap.GetSnapshotId())
	}
	return s.remove(ctx, old...)
}

// remove deletes manifests and the artifacts that only they named.
func (s *service) remove(ctx context.Context, ids ...string) error {
	if err := s.Store.Delete(ctx, ids...); err != nil {
		return err
	}
	crashpoint.Here("snapshot/deleted") // manifests are gone, their files are there
	return s.sweep(ctx)
}

// sweep deletes the artifacts that no manifest names.
func (s *service) sweep(ctx context.Context) error {
	s.files.Lock()
	defer s.files.Unlock()
	garbage, named, err := s.Store.Garbage(ctx)
	if err != nil {
		return err
	}
	if len(garbage) > 0 {
		if _, err := s.Artifacts.DeleteArtifacts(ctx, &storagev1.DeleteArtifactsRequest{ContentIds: garbage}); err != nil {
			return fmt.Errorf("delete %d artifacts: %w", len(garbage), err)
		}
	}
	crashpoint.Here("snapshot/swept") // files are gone, they are candidates still
	return s.Store.Forget(ctx, append(garbage, named...))
}

// materialize writes the files of a snapshot into dir; storage verifies each against its digest.
func (s *service) materialize(ctx context.Context, idOrPrefix, dir string) (*Snapshot, error) {
	if !filepath.IsAbs(dir) {
		return nil, ErrInvalid.Field("directory", "must be absolute")
	}
	s.files.RLock()
	defer s.files.RUnlock()
	snap, err := s.Store.Get(ctx, idOrPrefix)
	if err != nil {
		return nil, err
	}
	req := &storagev1.ExportArtifactsRequest{}
	for _, f := range snap.GetFiles() {
		req.Files = append(req.Files, &storagev1.LocalFile{Path: filepath.Join(dir, filepath.FromSlash(f.GetPath())), ContentId: f.GetDigest()})
	}
	if _, err := s.Artifacts.ExportArtifacts(ctx, req); err != nil {
		return nil, fmt.Errorf("write the files of %s: %w", snap.GetSnapshotId(), err)
	}
	return snap, nil
}

// pin keeps a snapshot from retention: the run that starts from it may need it again until it has one of its own.
func (s *service) pin(ctx context.Context, idOrPrefix string) (*Snapshot, error) {
	snap, err := s.Store.Get(ctx, idOrPrefix)
	if err != nil {
		return nil, err
	}
	return snap, s.Store.Pin(ctx, snap.GetSnapshotId())
}

// restore makes a new run of the same plan that goes on from the snapshot.
func (s *service) restore(ctx context.Context, idOrPrefix string) (*runv1.Run, error) {
	snap, err := s.Store.Get(ctx, idOrPrefix)
	if err != nil {
		return nil, err
	}
	if snap.GetKind() != TrainState {
		return nil, ErrKind.With("snapshot", snap.GetSnapshotId()).With("kind", snap.GetKind().String()).
			WithMessage("snapshot %s is no train_state: it can't be restored", snap.GetSnapshotId())
	}
	origin, err := s.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: snap.GetRunId()})
	if err != nil {
		return nil, fmt.Errorf("find the plan of %s: %w", snap.GetRunId(), err)
	}
	run := origin.GetStatus().GetRun()
	lock, err := id.CanonicalJSON(run.GetPlan())
	if err != nil {
		return nil, fmt.Errorf("write the plan of %s: %w", run.GetRunId(), err)
	}
	made, err := s.Scheduler.CreateRun(ctx, &runv1.CreateRunRequest{Lock: lock, BaseDir: run.GetBaseDir(), FromSnapshot: snap.GetSnapshotId()})
	if err != nil {
		return nil, restorable(snap, err)
	}
	return made.GetRun(), nil
}

// restorable says of changed inputs how the snapshot can be restored all the same.
func restorable(snap *Snapshot, err error) error {
	if e, ok := rpcerr.From(err); ok && e.Reason() == "PLAN_INPUTS_CHANGED" {
		return e.Fix("restore it, or begin the new run with the inputs as they are now: `rollout snapshot restore " + snap.GetSnapshotId() + " --accept-changes`")
	}
	return fmt.Errorf("restore %s: %w", snap.GetSnapshotId(), err)
}

// check names everything that is wrong with a manifest at once.
func check(s *Snapshot, dir string) error {
	bad := ErrInvalid
	if s.GetRunId() == "" {
		bad = bad.Field("snapshot.run_id", "must name the run")
	}
	if s.GetKind() == 0 {
		bad = bad.Field("snapshot.kind", "must be set")
	}
	if len(s.GetFiles()) == 0 {
		bad = bad.Field("snapshot.files", "must hold at least one file")
	}
	if !filepath.IsAbs(dir) {
		bad = bad.Field("directory", "must be absolute")
	}
	seen := map[string]bool{}
	for i, f := range s.GetFiles() {
		path := f.GetPath()
		if !filepath.IsLocal(filepath.FromSlash(path)) || seen[path] {
			bad = bad.Field(fmt.Sprintf("snapshot.files[%d].path", i), "must stay inside the folder and be named once: "+path)
		}
		seen[path] = true
		if !id.ValidContent(f.GetDigest()) {
			bad = bad.Field(fmt.Sprintf("snapshot.files[%d].digest", i), "must be a content id")
		}
	}
	if len(bad.Violations()) > 0 {
		return bad
	}
	return nil
}

func created(s *Snapshot) *eventv1.Event {
	return &eventv1.Event{
		RunId: s.GetRunId(), Step: s.GetStep(), Service: names.SnapshotService, Kind: "snapshot.created", Level: eventv1.Level_LEVEL_INFO,
		Time:       s.GetCreateTime(),
		EventId:    id.New(s.GetCreateTime().AsTime()),
		Message:    fmt.Sprintf("snapshot %s of step %d", s.GetSnapshotId(), s.GetStep()),
		Attributes: map[string]string{"snapshot": s.GetSnapshotId(), "digest": s.GetWeightsDigest()},
		Metrics:    map[string]float64{"bytes": float64(s.GetBytes())},
	}
}

var _ snapshotv1.SnapshotServiceServer = (*Server)(nil)
