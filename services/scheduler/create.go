package scheduler

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/id"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/trainstate"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	"github.com/rollout-rl/rollout/services/scheduler/issue"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// runs creates, pauses, resumes, and cancels runs. Safe for concurrent use.
type runs struct {
	Deps
	stateDir   string
	records    *records
	conductors *conductors
	// origins is locked for reading while a run is created from a snapshot, and for writing while a
	// deletion decides which snapshots are needed.
	origins sync.RWMutex
	// beginning is held while it is decided which incarnation of an active run is conducted here.
	beginning sync.Mutex
	adoptions adoptions
	reports   sync.Mutex // held while a report of a controller is handled
}

// create verifies the plan, records the run and starts it.
func (s *runs) create(ctx context.Context, req *runv1.CreateRunRequest) (*Run, error) {
	project, err := apikey.ProjectFor(ctx, req.GetProject())
	if err != nil {
		return nil, err
	}
	key := req.GetIdempotencyKey()
	if key != "" && project != "" { // keys of projects are distinct; no project has a slash
		key = project + "/" + key
	}
	if key != "" {
		first, err := s.Store.ByKey(ctx, key)
		if err == nil {
			return first, nil
		}
		if !errors.Is(err, ErrNotFound) {
			return nil, err
		}
	}
	plan, made, err := s.verify(ctx, req.GetLock(), req.GetBaseDir(), "")
	if err != nil {
		return nil, err
	}
	var cursor Cursor
	s.origins.RLock() // no deletion may miss the new run
	defer s.origins.RUnlock()
	from := req.GetFromSnapshot()
	if from != "" {
		if from, cursor, err = s.startingPoint(ctx, plan, from); err != nil {
			return nil, err
		}
	}
	now := s.Now().UTC()
	run := &Run{
		RunId: id.NewRun(now), Name: plan.GetConfig().GetName(), Plan: plan, BaseDir: req.GetBaseDir(), State: Pending,
		CreateTime: timestamppb.New(now), FromSnapshot: from, Step: cursor.FirstStep, TotalSteps: plan.GetConfig().GetTrain().GetSteps(),
		Incarnation: 1, Project: project,
	}
	s.setDirectory(run)
	if err := takeInputs(plan, made, planformat.InputsOf(run.GetDirectory())); err != nil {
		return nil, err
	}
	crashpoint.Here("scheduler/pinned") // the snapshot that the run starts from is pinned, the run is not recorded
	recorded, err := s.Store.Create(ctx, run, key, cursor)
	if err != nil || recorded.GetRunId() != run.GetRunId() {
		return recorded, err
	}
	crashpoint.Here("scheduler/created") // the run is recorded and not active
	s.records.announce(recorded)
	return recorded, s.conductors.start(recorded, nil)
}

// folder is that of a run below the state folder.
func (s *runs) folder(runID string) string { return filepath.Join(s.stateDir, "runs", runID) }

// setDirectory sets the folder of a run below the state folder, which may have been moved or copied
// since the last start.
func (s *runs) setDirectory(r *Run) {
	folder := s.folder(r.GetRunId())
	if within, ok := strings.CutPrefix(r.GetWeightsDirectory(), r.GetDirectory()+string(filepath.Separator)); ok && r.GetDirectory() != "" {
		r.WeightsDirectory = filepath.Join(folder, within)
	}
	r.Directory = folder
}

// verify asks the planner whether the inputs of the plan are unchanged. made is the folder of
// inputs of a run that has one. It returns the plan and the folder of inputs that was verified.
func (s *runs) verify(ctx context.Context, lock []byte, baseDir string, made planformat.Inputs) (*planv1.Plan, planformat.Inputs, error) {
	resp, err := s.Planner.VerifyPlan(ctx, &planv1.VerifyPlanRequest{
		Lock: lock, File: "plan.lock", BaseDir: baseDir, InputsDirectory: string(made),
	})
	if err != nil {
		return nil, "", fmt.Errorf("verify the plan: %w", err)
	}
	bad, n := ErrPlanChanged, len(resp.GetProblems())
	switch {
	case resp.GetPlan() == nil:
		if bad = ErrPlanUnreadable; n > 0 && resp.GetProblems()[0].GetReason() == ErrPlanFormat.Reason() {
			bad = ErrPlanFormat
		}
	case n == 0:
		return resp.GetPlan(), planformat.Inputs(resp.GetInputsDirectory()), nil
	case n == 1:
		bad = bad.WithMessage("an input of the plan has changed since the plan was made")
	default:
		bad = bad.WithMessage("%d inputs of the plan have changed since the plan was made", n)
	}
	for _, p := range resp.GetProblems() {
		where := p.GetFile()
		if p.GetField() != "" {
			where = p.GetField()
		}
		bad = bad.Field(where, p.GetMessage())
	}
	return nil, "", bad
}

// takeInputs links what the planner made or downloaded for a plan into the folder of a run, so that
// the run keeps it. Rows are copied across file systems.
func takeInputs(plan *planv1.Plan, from, to planformat.Inputs) error {
	for _, in := range plan.GetInputs() {
		var err error
		switch {
		case len(in.GetSources()) > 0:
			err = takeRows(from.Rows(in.GetDigest()), to.Rows(in.GetDigest()))
		case in.GetRevision() != "":
			name := planformat.ModelOf(in)
			err = takeModel(from.Model(name, in.GetRevision()), to.Model(name, in.GetRevision()))
		}
		if err != nil {
			return ErrInput.With("input", in.GetPath()).Wrap(fmt.Errorf("take %s into the folder of the run: %w", in.GetPath(), err))
		}
	}
	return nil
}

func takeRows(from, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	if err := os.Link(from, to); err == nil || errors.Is(err, fs.ErrExist) {
		return nil
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

func takeModel(from, to string) error {
	folder, err := filepath.EvalSymlinks(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	if err := os.Symlink(folder, to); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// startingPoint pins a snapshot, and returns its full id and the cursor of a run that starts from
// it.
func (s *runs) startingPoint(ctx context.Context, plan *planv1.Plan, snapshot string) (string, Cursor, error) {
	resp, err := s.Snapshots.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: snapshot})
	if err != nil {
		return "", Cursor{}, fmt.Errorf("start from snapshot: %w", err)
	}
	snap := resp.GetSnapshot()
	of, err := s.startable(ctx, snap)
	if err != nil {
		return "", Cursor{}, err
	}
	if train := plan.GetConfig().GetTrain(); snap.GetStep() >= train.GetSteps() {
		longer := fmt.Sprintf("raise `train.steps` above %d", snap.GetStep())
		if train.Epochs != nil {
			longer = fmt.Sprintf("raise `train.epochs` above %.6g, which counts from the first step",
				train.GetEpochs()*float64(snap.GetStep())/float64(train.GetSteps()))
		}
		return "", Cursor{}, ErrNothingToDo.With("snapshot", snap.GetSnapshotId()).
			WithMessage("snapshot %s is at step %d, and the plan has %d steps: no step is left", snap.GetSnapshotId(), snap.GetStep(), train.GetSteps()).
			Fix(fmt.Sprintf("%s: `rollout run --config FILE --from %s --continue`", longer, snap.GetSnapshotId()))
	}
	if lacks := mismatch(snap, of.GetConfig(), plan.GetConfig()); lacks != "" {
		return "", Cursor{}, ErrSnapshotKind.With("snapshot", snap.GetSnapshotId()).
			WithMessage("snapshot %s %s: a run of this plan cannot start from it", snap.GetSnapshotId(), lacks).
			Fix("to start at step 0 with its weights alone: `rollout run --config FILE --from " + snap.GetSnapshotId() + "`, without --continue")
	}
	if _, err := s.Snapshots.PinSnapshot(ctx, &snapshotv1.PinSnapshotRequest{SnapshotId: snap.GetSnapshotId(), Fence: s.fence(0)}); err != nil {
		return "", Cursor{}, fmt.Errorf("pin the snapshot that the run starts from: %w", err)
	}
	first := snap.GetCursor().GetPosition()
	if seedOf(snap) != nil {
		first = snap.GetFirstUnconsumed()
	}
	return snap.GetSnapshotId(), Cursor{Position: first, First: first, FirstStep: snap.GetStep()}, nil
}

// begin completes the ledger's config, and the window, of a run that starts from a snapshot with
// the groups that no step had consumed.
func (c *conductor) begin(ctx context.Context, run *Run, window issue.Window, config *bufferv1.LedgerConfig) (issue.Window, error) {
	if run.GetFromSnapshot() == "" {
		return window, nil
	}
	err := c.retry.Until(ctx, retry.Awaited{Owner: names.SnapshotService, What: "the snapshot that the run starts from (snapshot)"}, func(ctx context.Context) error {
		got, err := c.Snapshots.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: run.GetFromSnapshot()})
		if err != nil {
			return err
		}
		snap := got.GetSnapshot()
		if config.Seed = seedOf(snap); config.Seed != nil {
			config.Carried = snap.GetCursor().GetPosition() - window.First
		}
		if run.GetIncarnation() > 1 || run.GetState() != Starting { // it has them, and some may have ended
			return nil
		}
		_, err = c.Snapshots.AdoptEpisodes(ctx, &snapshotv1.AdoptEpisodesRequest{SnapshotId: snap.GetSnapshotId(), RunId: run.GetRunId(), Fence: c.fence()})
		return err
	})
	window.Carried = config.GetCarried()
	return window, err
}

// seedOf returns where a snapshot has the groups of its ledger; nil if it has none.
func seedOf(snap *snapshotv1.Snapshot) *bufferv1.LedgerSeed {
	seed := &bufferv1.LedgerSeed{RunIds: snap.GetSampledBy()}
	for _, f := range snap.GetFiles() {
		switch f.GetPath() {
		case trainstate.LedgerRows:
			seed.Rows = f.GetDigest()
		case trainstate.LedgerPayloads:
			seed.Payloads = f.GetDigest()
		}
	}
	if seed.GetRows() == "" || seed.GetPayloads() == "" {
		return nil
	}
	return seed
}

// mismatch describes why a run of a plan cannot start from a training state, judged by its files
// and by the configuration of its run, nil if that is not known; "" if it can.
func mismatch(snap *snapshotv1.Snapshot, of, config *configv1.RunConfig) string {
	adapters := trainstate.Has(snap, trainstate.Adapter)
	switch {
	case algorithm.Traits(config).GetNeedsCritic() && !trainstate.Has(snap, trainstate.Critic):
		return "has no critic, which [algorithm.ppo] needs"
	case config.GetLora() != nil && !adapters:
		return "has no adapters, which [lora] needs"
	case config.GetLora() == nil && adapters:
		return "has adapters, and the plan has no [lora]"
	case of == nil:
		return ""
	}
	was, is := of.GetModel().GetDtype(), config.GetModel().GetDtype()
	before, after := of.GetLora(), config.GetLora()
	switch {
	case was != is:
		return fmt.Sprintf("has weights in %s, and `model.dtype` of the plan is %s", was, is)
	case before.GetRank() != after.GetRank():
		return fmt.Sprintf("has adapters of rank %d, and `lora.rank` of the plan is %d", before.GetRank(), after.GetRank())
	case before.GetDora() != after.GetDora():
		return fmt.Sprintf("has `lora.dora = %t`, and the plan has %t", before.GetDora(), after.GetDora())
	}
	return ""
}

// trainData finds the training data among the inputs of a plan.
func trainData(run *Run) (issue.Data, error) {
	for _, in := range run.GetPlan().GetInputs() {
		if in.GetRole() != planv1.InputRole_INPUT_ROLE_TRAIN_DATA || in.GetRows() == 0 {
			continue
		}
		path := planformat.InputsOf(run.GetDirectory()).Locate(run.GetBaseDir(), in)
		return issue.Data{Path: path, Digest: in.GetDigest(), Rows: in.GetRows()}, nil
	}
	return issue.Data{}, ErrPlanUnreadable.Wrap(errors.New("the plan has no training data"))
}
