package scheduler

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/id"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// create verifies the plan, records the run and starts it.
func (s *service) create(ctx context.Context, req *runv1.CreateRunRequest) (*Run, error) {
	if key := req.GetIdempotencyKey(); key != "" {
		first, err := s.Store.ByKey(ctx, key)
		if err == nil {
			return first, nil
		}
		if !errors.Is(err, ErrNotFound) {
			return nil, err
		}
	}
	plan, err := s.verify(ctx, req.GetLock(), req.GetBaseDir())
	if err != nil {
		return nil, err
	}
	var cursor Cursor
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
		Incarnation: 1,
	}
	s.house(run)
	recorded, err := s.Store.Create(ctx, run, req.GetIdempotencyKey(), cursor)
	if err != nil || recorded.GetRunId() != run.GetRunId() {
		return recorded, err
	}
	crashpoint.Here("scheduler/created") // the run is recorded, nobody conducts it
	s.announce(recorded)
	return recorded, s.conduct(recorded)
}

// house gives a run its folder, where the state folder is now: it may have been moved, or be a copy whose original lives on.
func (s *service) house(r *Run) {
	folder := filepath.Join(s.cfg.StateDir, "runs", r.GetRunId())
	if within, ok := strings.CutPrefix(r.GetWeightsDirectory(), r.GetDirectory()+string(filepath.Separator)); ok && r.GetDirectory() != "" {
		r.WeightsDirectory = filepath.Join(folder, within)
	}
	r.Directory = folder
}

// verify asks the planner whether the plan's inputs still are what they were.
func (s *service) verify(ctx context.Context, lock []byte, baseDir string) (*planv1.Plan, error) {
	resp, err := s.Planner.VerifyPlan(ctx, &planv1.VerifyPlanRequest{Lock: lock, File: "plan.lock", BaseDir: baseDir})
	if err != nil {
		return nil, fmt.Errorf("verify the plan: %w", err)
	}
	bad, n := ErrPlanChanged, len(resp.GetProblems())
	switch {
	case resp.GetPlan() == nil:
		if bad = ErrPlanUnreadable; n > 0 && resp.GetProblems()[0].GetReason() == ErrPlanFormat.Reason() {
			bad = ErrPlanFormat
		}
	case n == 0:
		return resp.GetPlan(), nil
	case n == 1:
		bad = bad.WithMessage("something that the plan pins has changed since it was made")
	default:
		bad = bad.WithMessage("%d things that the plan pins have changed since it was made", n)
	}
	for _, p := range resp.GetProblems() {
		where := p.GetFile()
		if p.GetField() != "" {
			where = p.GetField()
		}
		bad = bad.Field(where, p.GetMessage())
	}
	return nil, bad
}

// startingPoint is the full id of a snapshot, which is kept from now on, and the cursor of a run that starts from it.
func (s *service) startingPoint(ctx context.Context, plan *planv1.Plan, snapshot string) (string, Cursor, error) {
	resp, err := s.Snapshots.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: snapshot})
	if err != nil {
		return "", Cursor{}, fmt.Errorf("start from snapshot: %w", err)
	}
	snap := resp.GetSnapshot()
	if snap.GetKind() != snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE {
		return "", Cursor{}, ErrSnapshotKind.With("snapshot", snap.GetSnapshotId()).
			WithMessage("snapshot %s is no train_state: a run can't start from it", snap.GetSnapshotId())
	}
	if steps := plan.GetConfig().GetTrain().GetSteps(); snap.GetStep() >= steps {
		return "", Cursor{}, ErrNothingToDo.With("snapshot", snap.GetSnapshotId()).
			WithMessage("snapshot %s is of step %d, and the plan wants %d steps: none is left", snap.GetSnapshotId(), snap.GetStep(), steps).
			Fix(fmt.Sprintf("raise `train.steps` above %d: `rollout run --config FILE --from %s`", snap.GetStep(), snap.GetSnapshotId()))
	}
	if lacks := unlike(snap, plan.GetConfig()); lacks != "" {
		return "", Cursor{}, ErrSnapshotKind.With("snapshot", snap.GetSnapshotId()).
			WithMessage("snapshot %s %s: a run of this plan can't go on from it", snap.GetSnapshotId(), lacks).
			Fix("to begin with its weights alone: `rollout export weights " + snap.GetSnapshotId() + " --to FOLDER`, and `path = \"FOLDER\"` in [model]")
	}
	if _, err := s.Snapshots.PinSnapshot(ctx, &snapshotv1.PinSnapshotRequest{SnapshotId: snap.GetSnapshotId()}); err != nil {
		return "", Cursor{}, fmt.Errorf("keep the snapshot that the run starts from: %w", err)
	}
	position := snap.GetCursor().GetPosition()
	return snap.GetSnapshotId(), Cursor{Position: position, First: position, FirstStep: snap.GetStep()}, nil
}

// unlike says what keeps a training state from being one of a plan, as far as its files tell; "" where nothing does.
func unlike(snap *snapshotv1.Snapshot, config *configv1.RunConfig) string {
	holds := func(prefix string) bool {
		return slices.ContainsFunc(snap.GetFiles(), func(f *snapshotv1.SnapshotFile) bool { return strings.HasPrefix(f.GetPath(), prefix) })
	}
	adapters := holds("adapter/")
	switch {
	case algorithm.Traits(config).GetNeedsCritic() && !holds("critic.safetensors"):
		return "holds no critic, which [algorithm.ppo] goes on with"
	case config.GetLora() != nil && !adapters:
		return "holds no adapters, which [lora] goes on with"
	case config.GetLora() == nil && adapters:
		return "holds adapters, and the plan has no [lora]"
	}
	return ""
}
