package controller

import (
	"context"
	"fmt"
	"time"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// ledger is the buffer's ledger of one run. Its calls are repeated until the buffer answers.
type ledger struct {
	settings
	buffer    Buffer
	leaseWait time.Duration // how long the buffer may wait for missing groups before it answers
	retries   retries
}

// step returns a committed step, or nil.
func (l *ledger) step(ctx context.Context, number uint64) (*bufferv1.StepRecord, error) {
	listed, err := l.list(ctx, &bufferv1.ListStepsRequest{RunId: l.runID, FromStep: number, PageSize: 1})
	if err != nil || len(listed) == 0 || listed[0].GetStep() != number {
		return nil, err
	}
	return listed[0], nil
}

// newest returns the last committed step, or nil before the first one.
func (l *ledger) newest(ctx context.Context) (*bufferv1.StepRecord, error) {
	listed, err := l.list(ctx, &bufferv1.ListStepsRequest{RunId: l.runID, Newest: true, PageSize: 1})
	if err != nil || len(listed) == 0 {
		return nil, err
	}
	return listed[0], nil
}

func (l *ledger) list(ctx context.Context, req *bufferv1.ListStepsRequest) ([]*bufferv1.StepRecord, error) {
	listed, err := call(ctx, l.retries, "buffer", l.buffer.ListSteps, req)
	if err != nil {
		return nil, fmt.Errorf("list committed steps: %w", err)
	}
	return listed.GetSteps(), nil
}

// recordWeights records the digest of the weights that the run starts from.
func (l *ledger) recordWeights(ctx context.Context, version uint64, digest string) error {
	if _, err := call(ctx, l.retries, "buffer", l.buffer.RecordWeights, &bufferv1.RecordWeightsRequest{RunId: l.runID, Version: version, Digest: digest, Fence: l.fence}); err != nil {
		return fmt.Errorf("record the initial weights: %w", err)
	}
	return nil
}

// recordRetrained records the digest of a version that was trained again in a run that does not
// promise bits, or whose weights a gate replaced. With promised bits, samples of replaced weights
// are sampled again: how many there are depends on time.
func (l *ledger) recordRetrained(ctx context.Context, version uint64, digest string) (*bufferv1.RecordWeightsResponse, error) {
	old := l.oldLineage
	if l.deterministic {
		old = bufferv1.OldLineage_OLD_LINEAGE_REISSUE
	}
	got, err := call(ctx, l.retries, "buffer", l.buffer.RecordWeights, &bufferv1.RecordWeightsRequest{
		RunId: l.runID, Version: version, Digest: digest, OldLineage: old, Fence: l.fence,
	})
	if err != nil {
		return nil, fmt.Errorf("record the other weights of step %d: %w", version, err)
	}
	return got, nil
}

// lease leases the batch of a step. The response has no batch while groups are missing.
func (l *ledger) lease(ctx context.Context, step uint64) (*bufferv1.LeaseBatchResponse, error) {
	got, err := call(ctx, l.retries, "buffer", l.buffer.LeaseBatch, &bufferv1.LeaseBatchRequest{RunId: l.runID, Step: step, WaitSeconds: l.leaseWait.Seconds(), Fence: l.fence})
	if err != nil {
		return nil, fmt.Errorf("lease the batch of step %d: %w", step, err)
	}
	return got, nil
}

// batch returns the batch of a committed step.
func (l *ledger) batch(ctx context.Context, step uint64) (*bufferv1.Batch, error) {
	got, err := call(ctx, l.retries, "buffer", l.buffer.GetBatch, &bufferv1.GetBatchRequest{RunId: l.runID, Step: step})
	if err != nil {
		return nil, fmt.Errorf("read the recorded batch of step %d: %w", step, err)
	}
	return got.GetBatch(), nil
}

// commit commits a step. The step exists when commit returns.
func (l *ledger) commit(ctx context.Context, batch *bufferv1.Batch, digest string) error {
	if _, err := call(ctx, l.retries, "buffer", l.buffer.CommitStep, &bufferv1.CommitStepRequest{
		RunId: l.runID, Step: batch.GetStep(), BatchId: batch.GetBatchId(), WeightsDigest: digest, Fence: l.fence,
	}); err != nil {
		return fmt.Errorf("commit step %d: %w", batch.GetStep(), err)
	}
	return nil
}

// trim lets the buffer delete the payloads of the steps up to the given one.
func (l *ledger) trim(ctx context.Context, through uint64) error {
	if _, err := call(ctx, l.retries, "buffer", l.buffer.TrimPayloads, &bufferv1.TrimPayloadsRequest{RunId: l.runID, ThroughStep: through, Fence: l.fence}); err != nil {
		return fmt.Errorf("trim payloads through step %d: %w", through, err)
	}
	return nil
}

// nextPosition is the position of the first group that the step after the given one consumes.
func (l *ledger) nextPosition(ctx context.Context, step uint64) (uint64, error) {
	s, err := l.step(ctx, step)
	if err != nil {
		return 0, err
	}
	if s.GetEndPosition() > 0 {
		return s.GetEndPosition(), nil
	}
	return step * uint64(l.cfg.GetTrain().GetGroupsPerStep()), nil // an older ledger has no end positions
}
