package snapshot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/trainstate"
	"github.com/rollout-rl/rollout/proto/gen/names"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// service is the use cases. Many goroutines may call its methods.
type service struct {
	Deps
	handlers handlers
	// files is locked for reading while artifacts are imported or exported, and for writing while a
	// sweep deletes artifacts.
	files sync.RWMutex
}

// fence is what the calls to the storage service carry.
func (s *service) fence() *fencev1.Fence {
	return &fencev1.Fence{Role: names.SnapshotService, LeaderEpoch: s.Epoch}
}

// create captures what the kind adds, imports the files of a folder, records the manifest, and
// applies retention. A repeated call returns the first snapshot. ErrConflict if that one has other
// content; what is captured is not compared, because it depends on the time of the call.
func (s *service) create(ctx context.Context, req *snapshotv1.CreateSnapshotRequest) (*Snapshot, error) {
	want, dir, keep, by := req.GetSnapshot(), req.GetDirectory(), int(req.GetKeep()), req.GetFence()
	if err := s.check(want, dir); err != nil {
		return nil, err
	}
	if err := s.own(ctx, want); err != nil {
		return nil, err
	}
	if err := s.Store.Admit(ctx, want.GetRunId(), by); err != nil {
		return nil, err
	}
	first, err := s.Store.Find(ctx, KeyOf(want))
	if err == nil && req.GetCapture() {
		return first, nil
	}
	if err == nil {
		return repeated(first, want)
	}
	if !errors.Is(err, ErrNotFound) {
		return nil, err
	}
	if req.GetCapture() {
		want = proto.CloneOf(want)
		if err := s.handlers[want.GetKind()].Capture(ctx, want, Folder{Dir: dir}); err != nil {
			return nil, fmt.Errorf("capture the %s of %s at step %d: %w", kindName(want.GetKind()), want.GetRunId(), want.GetStep(), err)
		}
		crashpoint.Here("snapshot/captured") // its files are written, nothing is stored
	}
	if bad := s.handlers[want.GetKind()].Check(want, ErrInvalid); len(bad.Violations()) > 0 {
		return nil, bad
	}
	snap, recorded, err := s.record(ctx, want, dir, by)
	if err != nil {
		return nil, err
	}
	if !recorded {
		return repeated(snap, want)
	}
	s.Events.Emit(created(snap))
	if err := s.retain(ctx, snap, keep); err != nil {
		s.Log.WarnContext(ctx, "old snapshots were not deleted", "run", snap.GetRunId(), "error", err)
	}
	return snap, nil
}

// repeated is the answer to a creation whose key exists already.
func repeated(first, want *Snapshot) (*Snapshot, error) {
	if sameContent(first, want) {
		return first, nil
	}
	return nil, ErrConflict.With("snapshot", first.GetSnapshotId()).
		WithMessage("snapshot %s of %s at step %d exists and has other content", first.GetSnapshotId(), first.GetRunId(), first.GetStep()).
		Fix("give the new snapshot another name, or delete " + first.GetSnapshotId())
}

// record imports the files and records the manifest. recorded is false if the key existed already;
// the snapshot is then the existing one.
func (s *service) record(ctx context.Context, want *Snapshot, dir string, by *fencev1.Fence) (snap *Snapshot, recorded bool, err error) {
	s.files.RLock()
	defer s.files.RUnlock()
	now := s.Now().UTC()
	made := proto.CloneOf(want)
	made.SnapshotId, made.CreateTime, made.Bytes = newID(now), timestamppb.New(now), 0
	if err := s.Store.Note(ctx, append(digests(want), made.GetSnapshotId())); err != nil {
		return nil, false, err
	}
	crashpoint.Here("snapshot/noted") // its files are candidates of a sweep, not imported
	resp, err := s.Artifacts.ImportArtifacts(ctx, &storagev1.ImportArtifactsRequest{Files: localFiles(want, dir), Fence: s.fence()})
	if err != nil {
		return nil, false, fmt.Errorf("import the files of the snapshot of %s at step %d: %w", want.GetRunId(), want.GetStep(), err)
	}
	crashpoint.Here("snapshot/imported") // files are imported, no manifest names them
	known, err := s.knownBlocks(ctx, made, resp.GetArtifacts())
	if err != nil {
		return nil, false, err
	}
	for i, f := range made.GetFiles() {
		if i >= len(resp.GetArtifacts()) || resp.GetArtifacts()[i].GetContentId() != f.GetDigest() {
			return nil, false, ErrMismatch.With("path", f.GetPath()).With("digest", f.GetDigest())
		}
		f.Bytes, f.Blocks = resp.GetArtifacts()[i].GetBytes(), []byte(cmp.Or(string(resp.GetArtifacts()[i].GetBlocks()), known[f.GetDigest()], string(f.GetBlocks())))
		if !trainstate.In(f, trainstate.Base) {
			made.Bytes += f.GetBytes()
		}
	}
	if err := s.publish(ctx, made); err != nil {
		return nil, false, err
	}
	crashpoint.Here("snapshot/published") // the bucket has the manifest, which is not recorded
	snap, err = s.Store.Record(ctx, made, by)
	if err != nil {
		return nil, false, err
	}
	crashpoint.Here("snapshot/recorded") // the manifest exists, its files are still candidates
	// If the key existed already, the files that only the new manifest names remain candidates.
	return snap, snap.GetSnapshotId() == made.GetSnapshotId(), s.Store.Forget(ctx, append(digests(snap), snap.GetSnapshotId()))
}

// knownBlocks returns the checksums of files that were stored before, by digest, from the newest
// manifest of the run.
func (s *service) knownBlocks(ctx context.Context, of *Snapshot, imported []*storagev1.ArtifactInfo) (map[string]string, error) {
	if !slices.ContainsFunc(imported, func(a *storagev1.ArtifactInfo) bool { return len(a.GetBlocks()) == 0 && a.GetBytes() > 0 }) {
		return nil, nil
	}
	newest, err := s.Store.List(ctx, Filter{Run: of.GetRunId(), Limit: 1})
	known := map[string]string{}
	for _, before := range newest {
		for _, f := range before.GetFiles() {
			known[f.GetDigest()] = string(f.GetBlocks())
		}
	}
	return known, err
}

// take takes snapshots of a run at its next committed step.
func (s *service) take(ctx context.Context, name string, kinds []Kind, label string) ([]*Snapshot, error) {
	for _, kind := range kinds {
		if _, err := s.handlers.of(kind); err != nil {
			return nil, err
		}
	}
	for {
		got, err := s.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: name})
		if err != nil {
			return nil, err
		}
		run := got.GetStatus().GetRun()
		if slices.Contains(kinds, Episodic) {
			if err := savesEpisodes(run); err != nil {
				return nil, err
			}
		}
		if err := inactive(run); err != nil {
			return nil, err
		}
		made, err := s.Controller.CutRun(ctx, &learnerv1.CutRunRequest{RunId: run.GetRunId(), Kinds: kinds, Name: label})
		if err == nil || rpcerr.Reason(err) != ErrNotTraining.Reason() {
			return made.GetSnapshots(), err
		}
		select { // the run is being started
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(startPause):
		}
	}
}

// startPause is the time after which a run that is being started is asked again.
const startPause = 200 * time.Millisecond

// ErrNotTraining refuses a snapshot of a run that commits no further step.
var ErrNotTraining = rpcerr.New(codes.FailedPrecondition, "RUN_NOT_TRAINING", "the run commits no further step")

// inactive is ErrNotTraining if the run commits no step unless a user acts.
func inactive(run *runv1.Run) error {
	var message, fix string
	name := run.GetRunId()
	switch run.GetState() {
	case runv1.RunState_RUN_STATE_PENDING, runv1.RunState_RUN_STATE_STARTING, runv1.RunState_RUN_STATE_RUNNING, runv1.RunState_RUN_STATE_DRAINING:
		return nil
	case runv1.RunState_RUN_STATE_SUCCEEDED:
		message = "%s has %s: it commits no further step"
		fix = "`rollout snapshot list " + name + "` shows its training states; `rollout run --config FILE --from SNAPSHOT --continue` trains one further"
	case runv1.RunState_RUN_STATE_PAUSED:
		message = "%s is %s: snapshots are taken when a step is committed"
		fix = "rollout runs resume " + name
	default:
		message = "%s is %s: snapshots are taken when a step is committed"
		fix = "`rollout run --resume " + name + "` continues it; `rollout snapshot list " + name + "` shows its training states"
	}
	return ErrNotTraining.With("run", name).Fix(fix).
		WithMessage(message, name, strings.TrimPrefix(run.GetState().String(), "RUN_STATE_"))
}

// localFiles names the files of a snapshot in a folder. Images hold the memory of processes,
// secrets included.
func localFiles(s *Snapshot, dir string) (files []*storagev1.LocalFile) {
	for _, f := range s.GetFiles() {
		files = append(files, &storagev1.LocalFile{Path: filepath.Join(dir, filepath.FromSlash(f.GetPath())), ContentId: f.GetDigest(), Private: trainstate.In(f, trainstate.Processes)})
	}
	return files
}

// retain deletes the snapshots of the same run, kind, and name beyond the newest keep, by step.
// Pinned snapshots stay.
func (s *service) retain(ctx context.Context, newest *Snapshot, keep int) error {
	if keep == 0 {
		return nil
	}
	all, err := s.Store.List(ctx, Filter{Run: newest.GetRunId(), Kind: newest.GetKind(), Unpinned: true})
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(other *Snapshot) bool { return other.GetName() != newest.GetName() })
	if len(all) <= keep {
		return nil
	}
	slices.SortFunc(all, func(a, b *Snapshot) int { return int(int64(b.GetStep()) - int64(a.GetStep())) })
	var old []string
	for _, snap := range all[keep:] {
		old = append(old, snap.GetSnapshotId())
	}
	return s.remove(ctx, nil, old...)
}

// removable returns ErrInUse for the newest training state of an active run, which needs it to
// recover; snapshots of other kinds are only restored by request. An unknown id is no error.
func (s *service) removable(ctx context.Context, id string) error {
	snap, err := s.get(ctx, id)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if snap.GetKind() != snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE {
		return nil
	}
	newest, err := s.Store.List(ctx, Filter{Run: snap.GetRunId(), Kind: snap.GetKind(), Limit: 1})
	if err != nil || len(newest) == 0 || newest[0].GetSnapshotId() != snap.GetSnapshotId() {
		return err
	}
	got, err := s.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: snap.GetRunId()})
	if rpcerr.Code(err) == codes.NotFound {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find the run of %s: %w", id, err)
	}
	switch run := got.GetStatus().GetRun(); run.GetState() {
	case runv1.RunState_RUN_STATE_SUCCEEDED, runv1.RunState_RUN_STATE_FAILED, runv1.RunState_RUN_STATE_CANCELLED,
		runv1.RunState_RUN_STATE_INTERRUPTED, runv1.RunState_RUN_STATE_DELETING:
		return nil
	default:
		return ErrInUse.With("snapshot", id).WithMessage("snapshot %s is the newest training state of the active run %s, which needs it to recover", id, run.GetRunId()).
			Fix("cancel the run first: `rollout runs cancel " + run.GetRunId() + "`")
	}
}

// remove deletes manifests, and the artifacts that no other manifest names.
func (s *service) remove(ctx context.Context, by *fencev1.Fence, ids ...string) error {
	if err := s.Store.Delete(ctx, by, ids...); err != nil {
		return err
	}
	crashpoint.Here("snapshot/deleted") // manifests are deleted, their files exist
	return s.sweep(ctx)
}

// sweep deletes the objects of manifests that do not exist, and then the artifacts that no manifest
// names, so that the bucket never has the manifest of a snapshot without its files.
func (s *service) sweep(ctx context.Context) error {
	s.files.Lock()
	defer s.files.Unlock()
	garbage, named, err := s.Store.Garbage(ctx)
	if err != nil {
		return err
	}
	files, manifests := split(garbage)
	if err := s.withdraw(ctx, manifests); err != nil {
		return err
	}
	if len(files) > 0 {
		if _, err := s.Artifacts.DeleteArtifacts(ctx, &storagev1.DeleteArtifactsRequest{ContentIds: files, Fence: s.fence()}); err != nil {
			return fmt.Errorf("delete %d artifacts: %w", len(files), err)
		}
	}
	crashpoint.Here("snapshot/swept") // files are deleted, they are still candidates
	return s.Store.Forget(ctx, append(garbage, named...))
}

// materialize writes the files with the given paths, or without paths all files, into dir. The
// storage service verifies their digests.
func (s *service) materialize(ctx context.Context, idOrPrefix, dir string, paths []string) (*Snapshot, error) {
	if !filepath.IsAbs(dir) {
		return nil, ErrInvalid.Field("directory", "must be absolute")
	}
	s.files.RLock()
	defer s.files.RUnlock()
	snap, err := s.get(ctx, idOrPrefix)
	if err != nil {
		return nil, err
	}
	wanted := snap
	if len(paths) > 0 {
		wanted = trainstate.Only(snap, paths...)
	}
	if len(wanted.GetFiles()) == 0 {
		return nil, ErrInvalid.Field("paths", "must name files of "+snap.GetSnapshotId())
	}
	if _, err := s.Artifacts.ExportArtifacts(ctx, &storagev1.ExportArtifactsRequest{Files: localFiles(wanted, dir)}); err != nil {
		return nil, fmt.Errorf("write the files of %s: %w", snap.GetSnapshotId(), err)
	}
	return snap, nil
}

// get returns a snapshot that the caller sees. ErrNotFound.
func (s *service) get(ctx context.Context, idOrPrefix string) (*Snapshot, error) {
	snap, err := s.Store.Get(ctx, idOrPrefix)
	if _, limited := apikey.ProjectOf(ctx); limited && errors.Is(err, ErrAmbiguous) {
		return nil, NotFound(idOrPrefix) // the others may be of another project
	}
	if err != nil {
		return nil, err
	}
	sees, err := s.sees(ctx, snap)
	if err != nil {
		return nil, err
	}
	if !sees {
		return nil, NotFound(idOrPrefix)
	}
	return snap, nil
}

// sees reports whether the caller sees a snapshot: that of a run of its project, or one that its
// project imported.
func (s *service) sees(ctx context.Context, snap *Snapshot) (bool, error) {
	if project, limited := apikey.ProjectOf(ctx); limited && snap.GetOrigin() != nil {
		return snap.GetOrigin().GetProject() == project, nil
	}
	return s.Projects.Sees(ctx, snap.GetRunId())
}

// own sets the project of an imported snapshot, and returns an error unless the caller may create
// snapshots of the run.
func (s *service) own(ctx context.Context, want *Snapshot) error {
	if want.GetOrigin() == nil {
		return s.Projects.Check(ctx, want.GetRunId())
	}
	want.Origin.Project, _ = apikey.ProjectOf(ctx)
	want.Origin.Deleted = false
	return s.Projects.CheckNew(ctx, want.GetRunId())
}

// list returns the snapshots of a filter that the caller sees.
func (s *service) list(ctx context.Context, f Filter) (found []*Snapshot, err error) {
	want := f.Limit
	for {
		page, err := s.Store.List(ctx, f)
		if err != nil {
			return nil, err
		}
		for _, snap := range page {
			f.After = snap.GetSnapshotId()
			sees, err := s.sees(ctx, snap)
			if err != nil {
				return nil, err
			}
			if sees && len(found) < want {
				found = append(found, snap)
			}
		}
		if len(found) >= want || len(page) < f.Limit {
			return found, nil
		}
	}
}

// pin exempts a snapshot from retention: the run that starts from it may need it again until it has
// a snapshot itself.
func (s *service) pin(ctx context.Context, idOrPrefix string, by *fencev1.Fence) (*Snapshot, error) {
	snap, err := s.get(ctx, idOrPrefix)
	if err != nil {
		return nil, err
	}
	return snap, s.Store.Pin(ctx, snap.GetSnapshotId(), by)
}

// deletePage is the number of manifests that are deleted at a time.
const deletePage = 100

// deleteRun deletes the snapshots of a run except those to keep, and returns the ids of the kept
// ones. The pin of another one was left by a run that was not created, or is deleted.
func (s *service) deleteRun(ctx context.Context, run string, keep []string, by *fencev1.Fence) (kept []string, err error) {
	if err := s.Store.DropRun(ctx, run, by); err != nil {
		return nil, err
	}
	for after := ""; ; {
		page, err := s.Store.List(ctx, Filter{Run: run, After: after, Limit: deletePage})
		if err != nil {
			return nil, err
		}
		var gone []string
		for _, snap := range page {
			after = snap.GetSnapshotId()
			if slices.Contains(keep, after) {
				kept = append(kept, after)
				if err := s.orphan(ctx, snap); err != nil {
					return nil, err
				}
				continue
			}
			if err := s.Store.Unpin(ctx, after, by); err != nil && !errors.Is(err, ErrNotFound) {
				return nil, err
			}
			gone = append(gone, after)
		}
		if err := s.Store.Delete(ctx, by, gone...); err != nil {
			return nil, err
		}
		if len(page) < deletePage {
			return kept, s.sweep(ctx)
		}
	}
}

// orphan records what a restore needs to know of the run of a snapshot that stays when its run is
// deleted. An imported snapshot has it.
func (s *service) orphan(ctx context.Context, snap *Snapshot) error {
	if snap.GetOrigin() != nil {
		return nil
	}
	origin, err := originOf(ctx, s.Scheduler, snap)
	if rpcerr.Code(err) == codes.NotFound {
		return nil // nothing is known of the run any more
	}
	if err != nil {
		return fmt.Errorf("find the plan of %s: %w", snap.GetRunId(), err)
	}
	origin.Deleted = true
	snap.Origin = origin
	return s.Store.Update(ctx, snap)
}

// restore creates a run that continues from a snapshot.
func (s *service) restore(ctx context.Context, idOrPrefix string) (*runv1.Run, error) {
	snap, err := s.get(ctx, idOrPrefix)
	if err != nil {
		return nil, err
	}
	handler, err := s.handlers.of(snap.GetKind())
	if err != nil {
		return nil, err
	}
	return handler.Restore(ctx, snap)
}

// check returns all errors of a new manifest at once.
func (s *service) check(snap *Snapshot, dir string) error {
	bad := ErrInvalid
	if snap.GetRunId() == "" {
		bad = bad.Field("snapshot.run_id", "must be set")
	}
	if !filepath.IsAbs(dir) {
		bad = bad.Field("directory", "must be absolute")
	}
	paths := map[string]bool{}
	for i, f := range snap.GetFiles() {
		path := f.GetPath()
		if !filepath.IsLocal(filepath.FromSlash(path)) || paths[path] {
			bad = bad.Field(fmt.Sprintf("snapshot.files[%d].path", i), "must be inside of the folder, and occur once: "+path)
		}
		paths[path] = true
		if !id.ValidContent(f.GetDigest()) {
			bad = bad.Field(fmt.Sprintf("snapshot.files[%d].digest", i), "must be a content id")
		}
	}
	if snap.GetKind() == 0 {
		bad = bad.Field("snapshot.kind", "must be set")
	} else if _, err := s.handlers.of(snap.GetKind()); err != nil {
		return err
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
