package controller

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// snapshot saves the training state of a committed step, then lets the buffer drop the payloads that it covers.
func (d *drive) snapshot(ctx context.Context, l *learner, step uint64) error {
	d.enter(snapshotting, l.worker+" to write its state")
	dir := filepath.Join(d.spec.GetRunDirectory(), "state", fmt.Sprintf("step-%06d", step))
	defer func() { _ = os.RemoveAll(dir) }()
	saved, err := ask(ctx, l, func(ctx context.Context) (*learnerv1.SaveStateResponse, error) {
		return l.client.SaveState(ctx, &learnerv1.SaveStateRequest{RunId: d.spec.GetRunId(), Step: step, Directory: dir})
	})
	if err != nil {
		return fmt.Errorf("save the state of step %d: %w", step, err)
	}
	crashpoint.Here("controller/saved") // the learner has written its state, no snapshot names it
	position, err := d.position(ctx, step)
	if err != nil {
		return err
	}
	d.waiting("snapshot to take the files")
	if _, err := call(ctx, d, "snapshot", func(ctx context.Context) (*snapshotv1.CreateSnapshotResponse, error) {
		return d.deps.Snapshots.CreateSnapshot(ctx, &snapshotv1.CreateSnapshotRequest{
			Snapshot: d.manifest(step, position, saved), Directory: dir, Keep: d.set.cfg.GetSnapshot().GetKeep(),
		})
	}); err != nil {
		return fmt.Errorf("take a snapshot of step %d: %w", step, err)
	}
	crashpoint.Here("controller/snapshotted") // the snapshot is there, its payloads too
	if d.set.cfg.GetSnapshot().GetKeepPayloads() {
		return nil
	}
	if _, err := call(ctx, d, "buffer", func(ctx context.Context) (*bufferv1.TrimPayloadsResponse, error) {
		return d.deps.Buffer.TrimPayloads(ctx, &bufferv1.TrimPayloadsRequest{RunId: d.spec.GetRunId(), ThroughStep: step})
	}); err != nil {
		return fmt.Errorf("trim payloads through step %d: %w", step, err)
	}
	crashpoint.Here("controller/trimmed")
	return nil
}

// position is where the step after the given one begins.
func (d *drive) position(ctx context.Context, step uint64) (uint64, error) {
	listed, err := call(ctx, d, "buffer", func(ctx context.Context) (*bufferv1.ListStepsResponse, error) {
		return d.deps.Buffer.ListSteps(ctx, &bufferv1.ListStepsRequest{RunId: d.spec.GetRunId(), FromStep: step})
	})
	if err != nil {
		return 0, fmt.Errorf("find where step %d ends: %w", step, err)
	}
	for _, s := range listed.GetSteps() {
		if s.GetStep() == step && s.GetEndPosition() > 0 {
			return s.GetEndPosition(), nil
		}
	}
	return step * uint64(d.set.cfg.GetTrain().GetGroupsPerStep()), nil // a step of before ledgers said so
}

func (d *drive) manifest(step, position uint64, saved *learnerv1.SaveStateResponse) *snapshotv1.Snapshot {
	cursor := &runv1.Cursor{Position: position, Rows: d.set.rows}
	if d.set.rows > 0 {
		cursor.Epoch, cursor.Index = uint32(position/d.set.rows), position%d.set.rows
	}
	return &snapshotv1.Snapshot{
		RunId: d.spec.GetRunId(), Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, Step: step,
		WeightsDigest: saved.GetWeightsDigest(), Cursor: cursor, Files: saved.GetFiles(), PlanId: d.spec.GetPlan().GetPlanId(),
		Rng: map[string]string{"inference-worker": "counter", "learner-worker": "optimizer.safetensors"},
	}
}
