package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/trainstate"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	"github.com/rollout-rl/rollout/services/controller/gate"
)

// snapshotter moves training states between the learner and the snapshot service. The goroutine of
// the drive uses it.
type snapshotter struct {
	settings
	learner  *learner
	service  Snapshots
	ledger   *ledger
	delivery *delivery
	progress *progress
	retries  retries
	room     *room
	cuts     *cuts
	gates    *gate.Monitor
	log      *slog.Logger

	writing *writing // nil: none
	owed    bool     // a periodic snapshot found no space on the disk
}

// nextSnapshot names the write in what people read.
const nextSnapshot = "the next snapshot"

const trainState = snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE

// reasonConflict is the reason for refusing a snapshot whose key exists with other content.
const reasonConflict = "SNAPSHOT_CONFLICT"

// take saves the training state of a committed step, then lets the buffer delete the payloads that
// a recovery does not need any more. It waits for space on the disk; a drive that is asked to stop
// in the meantime takes no snapshot.
func (s *snapshotter) take(ctx context.Context, step uint64, names ...string) error {
	return s.unlessFull(ctx, step, s.save(ctx, step, names))
}

// unlessFull returns an error of a snapshot, except that a drive stopped while it waited for space.
func (s *snapshotter) unlessFull(ctx context.Context, step uint64, err error) error {
	if errors.Is(err, errNoRoom) {
		s.log.WarnContext(ctx, "the run stops without a snapshot, because the disk is full; when it is resumed, the steps since the last one are retrained", "step", step)
		return nil
	}
	return err
}

// periodic is the name of the snapshots that are due every n steps.
const periodic = ""

func (s *snapshotter) save(ctx context.Context, step uint64, names []string) error {
	dir := newScratch(s.directory, s.fence).newDir(fmt.Sprintf("step-%06d", step))
	defer func() { _ = os.RemoveAll(dir) }()
	state, err := s.state(ctx, step, dir)
	if err != nil {
		return err
	}
	s.progress.waitFor(service("snapshot", "snapshot to store the files"))
	bytes, err := s.store(ctx, step, dir, names, state)
	s.room.state = max(s.room.state, bytes)
	if err == nil && slices.Contains(names, periodic) {
		s.owed = false
	}
	return err
}

// store makes snapshots of a state in a folder, and returns its size.
func (s *snapshotter) store(ctx context.Context, step uint64, dir string, names []string, state func(snapshotv1.SnapshotKind) *snapshotv1.Snapshot) (bytes uint64, err error) {
	for _, name := range names {
		manifest := state(trainState)
		manifest.Name = name
		created, err := call(ctx, s.retries, "snapshot", s.service.CreateSnapshot, &snapshotv1.CreateSnapshotRequest{
			Snapshot: manifest, Directory: dir, Keep: s.kept(name), Fence: s.fence,
		})
		if rpcerr.Reason(err) == reasonConflict {
			// The step was snapshotted before its learner was lost, and a retrained state can differ.
			s.log.WarnContext(ctx, "a snapshot of the step exists and has other content; it is kept", "step", step, "name", name)
		} else if err != nil {
			return bytes, fmt.Errorf("create a snapshot of step %d: %w", step, err)
		}
		bytes = max(bytes, created.GetSnapshot().GetBytes())
	}
	crashpoint.Here("controller/snapshotted") // the snapshot exists, and so do the payloads
	if s.cfg.GetSnapshot().GetKeepPayloads() || !slices.Contains(names, periodic) {
		return bytes, nil
	}
	if err := s.ledger.trim(ctx, step); err != nil {
		return bytes, err
	}
	crashpoint.Here("controller/trimmed")
	return bytes, nil
}

// writing is a periodic snapshot that is written while the next steps are made.
type writing struct {
	step     uint64
	progress *progress // what the write waits for
	cancel   context.CancelFunc
	done     chan struct{} // closed when bytes or err is set
	bytes    uint64        // size of the state
	err      error
}

// begin starts to take the periodic snapshot of a committed step. When it returns, the learner has
// copied its state and the next step may begin.
func (s *snapshotter) begin(ctx context.Context, step uint64) error {
	s.progress.enter(snapshotting)
	s.progress.waitFor(work("to copy its state", s.learner.worker))
	need := s.room.stateBytes(s.delivery.newest)
	if err := s.room.wait(ctx, need, nextSnapshot); err != nil {
		return s.unlessFull(ctx, step, err)
	}
	dir := newScratch(s.directory, s.fence).newDir(fmt.Sprintf("step-%06d", step))
	_, err := repeat(ctx, s.room, need, nextSnapshot, func() (struct{}, error) { return struct{}{}, s.learner.copy(ctx, step, dir) })
	if err != nil {
		return s.unlessFull(ctx, step, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	apart := s.apart()
	w := &writing{step: step, progress: apart.progress, cancel: cancel, done: make(chan struct{})}
	s.writing = w
	go func() {
		defer close(w.done)
		w.bytes, w.err = apart.write(ctx, step, dir)
	}()
	return nil
}

// apart returns a snapshotter for another goroutine than that of the drive. What it waits for is in
// a progress that only watch shows, and it does not wait for space on the disk: errNoRoom.
func (s *snapshotter) apart() *snapshotter {
	own := newProgress(s.progress.events, &learnerv1.Progress{Phase: snapshotting})
	full := make(chan struct{})
	close(full)
	retries := retries{first: s.retries.first, progress: own, room: &room{disk: s.room.disk, progress: own, pause: time.Hour, draining: full}}
	ledger := *s.ledger
	ledger.retries = retries
	return &snapshotter{settings: s.settings, learner: s.learner, service: s.service, ledger: &ledger, progress: own, retries: retries, log: s.log}
}

// write makes the snapshot of a state that the learner has copied.
func (s *snapshotter) write(ctx context.Context, step uint64, dir string) (bytes uint64, err error) {
	defer func() { _ = os.RemoveAll(dir) }()
	s.progress.waitFor(work(fmt.Sprintf("to write its state of step %d", step), s.learner.worker))
	saved, err := s.learner.save(ctx, step, dir)
	if err != nil {
		return 0, err
	}
	crashpoint.Here("controller/saved") // the learner has written its state, no snapshot names it
	position, err := s.ledger.nextPosition(ctx, step)
	if err != nil {
		return 0, err
	}
	s.progress.waitFor(service("snapshot", "snapshot to store the files"))
	return s.store(ctx, step, dir, []string{periodic}, func(kind snapshotv1.SnapshotKind) *snapshotv1.Snapshot {
		return s.manifest(kind, step, position, saved)
	})
}

// join waits for the snapshot that begin has started, if there is one.
func (s *snapshotter) join(ctx context.Context) error {
	if s.writing != nil && !closed(s.writing.done) {
		s.progress.enter(snapshotting)
		if err := s.watch(ctx); err != nil {
			return err
		}
	}
	return s.finish(ctx)
}

// watch waits until the snapshot is written, and shows what the write waits for.
func (s *snapshotter) watch(ctx context.Context) error {
	for {
		now, changed := s.writing.progress.read()
		waits := make([]*waitv1.Wait, len(now.GetWaits()))
		for i, w := range now.GetWaits() {
			waits[i] = proto.CloneOf(w)
		}
		s.progress.waitFor(waits...)
		select {
		case <-s.writing.done:
			return nil
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// finish reads how the snapshot ended that begin has started, if it ended. One that found no space
// on the disk is replaced by one of the next step, which waits for space.
func (s *snapshotter) finish(ctx context.Context) error {
	w := s.writing
	if w == nil || !closed(w.done) {
		return nil
	}
	w.cancel()
	s.writing = nil
	s.room.state = max(s.room.state, w.bytes)
	if rpcerr.DiskFull(w.err) || errors.Is(w.err, errNoRoom) {
		s.log.WarnContext(ctx, "the disk has no space for a snapshot; the next step gets one: "+rpcerr.Text(w.err), "step", w.step)
		s.owed = true
		return nil
	}
	return w.err
}

// writeGrace is how long the end of a session waits for a snapshot.
const writeGrace = 30 * time.Second

// close waits a while for the snapshot that begin has started. It is there only if the session
// failed: if the learner was lost, the context of the write has ended.
func (s *snapshotter) close(ctx context.Context) {
	if s.writing == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, writeGrace)
	_ = s.watch(ctx)
	cancel()
	s.writing.cancel()
	<-s.writing.done
	s.writing = nil
}

// overdue records whether the newest training state is older than the last step that should have
// one: the process that wrote it, or its learner, was lost. The next step gets a snapshot then.
func (s *snapshotter) overdue(ctx context.Context, base, committed uint64) error {
	every := s.cfg.GetSnapshot().GetEverySteps()
	if every == 0 || committed-committed%every <= base {
		return nil
	}
	listed, err := call(ctx, s.retries, "snapshot", s.service.ListSnapshots, &snapshotv1.ListSnapshotsRequest{RunId: s.runID, Kind: trainState, PageSize: 1})
	if err != nil {
		return fmt.Errorf("find the newest snapshot: %w", err)
	}
	newest := base
	for _, found := range listed.GetSnapshots() {
		newest = max(newest, found.GetStep())
	}
	s.owed = newest < committed-committed%every
	return nil
}

// kept is how many snapshots of a name the run keeps; 0: all.
func (s *snapshotter) kept(name string) uint32 {
	switch name {
	case periodic:
		return s.cfg.GetSnapshot().GetKeep()
	case gate.Best:
		return s.cfg.GetSnapshot().GetKeepBest()
	}
	return 0
}

// state has the learner write the training state of a committed step into a folder, and returns
// what makes a manifest of it.
func (s *snapshotter) state(ctx context.Context, step uint64, dir string) (manifest func(snapshotv1.SnapshotKind) *snapshotv1.Snapshot, err error) {
	s.progress.enter(snapshotting)
	s.progress.waitFor(work("to write its state", s.learner.worker))
	need := s.room.stateBytes(s.delivery.newest)
	if err := s.room.wait(ctx, need, nextSnapshot); err != nil {
		return nil, err
	}
	saved, err := repeat(ctx, s.room, need, nextSnapshot, func() (*learnerv1.SaveStateResponse, error) {
		saved, err := s.learner.save(ctx, step, dir)
		if err != nil {
			_ = os.RemoveAll(dir) // an incomplete state uses space
		}
		return saved, err
	})
	if err != nil {
		return nil, err
	}
	crashpoint.Here("controller/saved") // the learner has written its state, no snapshot names it
	position, err := s.ledger.nextPosition(ctx, step)
	return func(kind snapshotv1.SnapshotKind) *snapshotv1.Snapshot {
		return s.manifest(kind, step, position, saved)
	}, err
}

func (s *snapshotter) manifest(kind snapshotv1.SnapshotKind, step, position uint64, saved *learnerv1.SaveStateResponse) *snapshotv1.Snapshot {
	cursor := &runv1.Cursor{Position: position, Rows: s.rows}
	if s.rows > 0 {
		cursor.Epoch, cursor.Index = uint32(position/s.rows), position%s.rows
	}
	return &snapshotv1.Snapshot{
		RunId: s.runID, Kind: kind, Step: step,
		WeightsDigest: saved.GetWeightsDigest(), Cursor: cursor, Files: saved.GetFiles(), PlanId: s.planID,
		Rng: map[string]string{"inference-worker": "counter", "learner-worker": "optimizer.safetensors"},
	}
}

// base is the step that the run starts from.
func (s *snapshotter) base(ctx context.Context) (uint64, error) {
	if s.fromSnapshot == "" {
		return 0, nil
	}
	first, err := s.first(ctx)
	return first.GetStep(), err
}

// first is the snapshot that the run starts from.
func (s *snapshotter) first(ctx context.Context) (*snapshotv1.Snapshot, error) {
	first, err := s.get(ctx, s.fromSnapshot)
	if err != nil {
		return nil, fmt.Errorf("the run starts from it: %w", err)
	}
	return first, nil
}

// get returns a snapshot.
func (s *snapshotter) get(ctx context.Context, id string) (*snapshotv1.Snapshot, error) {
	got, err := call(ctx, s.retries, "snapshot", s.service.GetSnapshot, &snapshotv1.GetSnapshotRequest{SnapshotId: id})
	if err != nil {
		return nil, fmt.Errorf("find snapshot %s: %w", id, err)
	}
	return got.GetSnapshot(), nil
}

// load has the learner load the newest training state, unless it has one already.
func (s *snapshotter) load(ctx context.Context) (*learnerv1.InitializeResponse, error) {
	if err := newScratch(s.directory, s.fence).sweep(); err != nil { // it uses space, no more
		s.log.WarnContext(ctx, "folders that a former leader has left could not be removed", "error", err)
	}
	initialized, err := s.learner.initialized(ctx)
	if err != nil {
		return nil, err
	}
	var step uint64
	var dir string
	if !initialized {
		if step, dir, err = s.materialize(ctx); err != nil {
			return nil, err
		}
	}
	s.progress.waitFor(work("to load the model and its state", s.learner.worker))
	state, err := s.learner.initialize(ctx, step, dir)
	if err != nil {
		return nil, err
	}
	crashpoint.Here("controller/loaded") // the learner has loaded the state, the folder with the copy exists
	if dir != "" {
		_ = os.RemoveAll(dir)
	}
	return state, nil
}

// materialize writes the newest training state of the run, or else the one that the run starts
// from, into a folder, and returns its step. The folder is "" without a training state.
func (s *snapshotter) materialize(ctx context.Context) (step uint64, dir string, err error) {
	listed, err := call(ctx, s.retries, "snapshot", s.service.ListSnapshots, &snapshotv1.ListSnapshotsRequest{
		RunId: s.runID, Kind: trainState, PageSize: 100,
	})
	if err != nil {
		return 0, "", fmt.Errorf("find the newest snapshot: %w", err)
	}
	var from *snapshotv1.Snapshot
	switch {
	case len(listed.GetSnapshots()) > 0:
		from = s.newest(listed.GetSnapshots())
		s.room.state = from.GetBytes()
	case s.fromSnapshot != "":
		if from, err = s.first(ctx); err != nil {
			return 0, "", err
		}
	default:
		return 0, "", nil
	}
	dir, err = s.copy(ctx, from)
	return from.GetStep(), dir, err
}

// newest is the newest of a list of snapshots, which begins with it. If a gate replaced the weights
// of the step, one that was taken before does not count while there is one of the restored state.
func (s *snapshotter) newest(list []*snapshotv1.Snapshot) *snapshotv1.Snapshot {
	if r := s.gates.Restored(list[0].GetStep()); r != nil {
		for _, other := range list {
			if other.GetStep() == r.Step && other.GetName() == periodic && other.GetWeightsDigest() == r.Digest {
				return other
			}
		}
	}
	return list[0]
}

// best returns the newest snapshot of a best value; nil without one.
func (s *snapshotter) best(ctx context.Context) (*snapshotv1.Snapshot, error) {
	for token := ""; ; {
		listed, err := call(ctx, s.retries, "snapshot", s.service.ListSnapshots, &snapshotv1.ListSnapshotsRequest{RunId: s.runID, Kind: trainState, PageSize: 100, PageToken: token})
		if err != nil {
			return nil, fmt.Errorf("find the best snapshot: %w", err)
		}
		for _, found := range listed.GetSnapshots() {
			if found.GetName() == gate.Best {
				return found, nil
			}
		}
		if token = listed.GetNextPageToken(); token == "" {
			return nil, nil
		}
	}
}

// copy writes a snapshot into a folder.
func (s *snapshotter) copy(ctx context.Context, from *snapshotv1.Snapshot) (dir string, err error) {
	if err := s.room.wait(ctx, s.room.state, "a copy of a snapshot"); err != nil {
		return "", err
	}
	id := from.GetSnapshotId()
	dir = newScratch(s.directory, s.fence).dir("load-" + id)
	s.progress.waitFor(service("snapshot", fmt.Sprintf("snapshot %s to be written to a folder (snapshot)", id)))
	_, err = call(ctx, s.retries, "snapshot", s.service.MaterializeSnapshot, &snapshotv1.MaterializeSnapshotRequest{
		SnapshotId: id, Directory: dir, Paths: trainstate.Paths(trainstate.Without(trainstate.State(from), trainstate.Base)),
	})
	if err != nil {
		return "", fmt.Errorf("write snapshot %s to a folder: %w", id, err)
	}
	return dir, nil
}
