package controller

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// Ledger.

func (w *world) RecordWeights(_ context.Context, in *bufferv1.RecordWeightsRequest, _ ...grpc.CallOption) (*bufferv1.RecordWeightsResponse, error) {
	effect, err := w.at("RecordWeights")
	if effect {
		w.mu.Lock()
		defer w.mu.Unlock()
		if in.GetVersion() > 0 {
			return w.recordRetrained(in), err
		}
		w.initial = in.GetDigest()
	}
	return &bufferv1.RecordWeightsResponse{}, err
}

// recordRetrained begins a lineage if a version has another digest than before, like the ledger.
func (w *world) recordRetrained(in *bufferv1.RecordWeightsRequest) *bufferv1.RecordWeightsResponse {
	before := w.steps[in.GetVersion()-1].GetWeightsDigest()
	if d, again := w.retrained[in.GetVersion()]; again {
		before = d
	}
	out := &bufferv1.RecordWeightsResponse{Forked: before != "" && before != in.GetDigest(), LostDigest: before}
	if out.Forked {
		w.lineage++
		w.oldLineage = in.GetOldLineage()
	}
	if before != in.GetDigest() {
		w.retrained[in.GetVersion()] = in.GetDigest()
	}
	out.Lineage = w.lineage
	return out
}

func (w *world) LeaseBatch(ctx context.Context, in *bufferv1.LeaseBatchRequest, _ ...grpc.CallOption) (*bufferv1.LeaseBatchResponse, error) {
	if _, err := w.at("LeaseBatch"); err != nil {
		return nil, err
	}
	w.mu.Lock()
	starved := w.starved
	w.mu.Unlock()
	if starved != nil {
		starved()
		sleep(ctx, time.Millisecond) // like the buffer, which delays its answer
		return &bufferv1.LeaseBatchResponse{Waits: []*waitv1.Wait{{Owner: "worker", Reason: "GROUPS_MISSING", Evidence: "samples"}}}, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if in.GetStep() != uint64(len(w.steps))+1 {
		return nil, status.Errorf(codes.FailedPrecondition, "lease of step %d after %d", in.GetStep(), len(w.steps))
	}
	return &bufferv1.LeaseBatchResponse{Batch: batch(in.GetStep())}, nil
}

func batch(step uint64) *bufferv1.Batch {
	return &bufferv1.Batch{RunId: run, Step: step, BatchId: digestOf("batch", step), Groups: 2, Samples: make([]*bufferv1.SampleRef, 4)}
}

func (w *world) CommitStep(_ context.Context, in *bufferv1.CommitStepRequest, _ ...grpc.CallOption) (*bufferv1.CommitStepResponse, error) {
	effect, fault := w.at("CommitStep")
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refuse == in.GetStep() {
		return nil, status.Error(codes.Unavailable, "the step is not committed")
	}
	record := &bufferv1.StepRecord{Step: in.GetStep(), BatchId: in.GetBatchId(), WeightsDigest: in.GetWeightsDigest()}
	switch n := uint64(len(w.steps)); {
	case in.GetStep() == n && proto.Equal(w.steps[n-1], record):
	case in.GetStep() != n+1:
		return nil, status.Errorf(codes.FailedPrecondition, "commit of step %d after %d", in.GetStep(), n)
	case effect:
		w.steps = append(w.steps, record)
	}
	return &bufferv1.CommitStepResponse{Step: record}, fault
}

func (w *world) GetBatch(_ context.Context, in *bufferv1.GetBatchRequest, _ ...grpc.CallOption) (*bufferv1.GetBatchResponse, error) {
	_, err := w.at("GetBatch")
	return &bufferv1.GetBatchResponse{Batch: batch(in.GetStep())}, err
}

func (w *world) ListSteps(_ context.Context, in *bufferv1.ListStepsRequest, _ ...grpc.CallOption) (*bufferv1.ListStepsResponse, error) {
	_, err := w.at("ListSteps")
	w.mu.Lock()
	defer w.mu.Unlock()
	steps := slices.DeleteFunc(slices.Clone(w.steps), func(s *bufferv1.StepRecord) bool { return s.GetStep() < in.GetFromStep() })
	if n := int(in.GetPageSize()); len(steps) > n {
		if in.GetNewest() {
			steps = steps[len(steps)-n:]
		} else {
			steps = steps[:n]
		}
	}
	return &bufferv1.ListStepsResponse{Steps: steps}, err
}

func (w *world) TrimPayloads(context.Context, *bufferv1.TrimPayloadsRequest, ...grpc.CallOption) (*bufferv1.TrimPayloadsResponse, error) {
	_, err := w.at("TrimPayloads")
	return &bufferv1.TrimPayloadsResponse{}, err
}

// Snapshots.

func (w *world) CreateSnapshot(_ context.Context, in *snapshotv1.CreateSnapshotRequest, _ ...grpc.CallOption) (*snapshotv1.CreateSnapshotResponse, error) {
	effect, err := w.at("CreateSnapshot")
	if effect {
		w.mu.Lock()
		s := proto.CloneOf(in.GetSnapshot())
		s.SnapshotId = fmt.Sprintf("snap-%d%s", s.GetStep(), s.GetName())
		exists := slices.ContainsFunc(w.snapshots, func(other *snapshotv1.Snapshot) bool {
			return other.GetStep() == s.GetStep() && other.GetName() == s.GetName()
		})
		if !exists {
			w.snapshots = append(w.snapshots, s)
		}
		w.mu.Unlock()
		if exists && err == nil { // as if the learner had saved other bits
			err = rpcerr.New(codes.AlreadyExists, reasonConflict, "step %d", s.GetStep())
		}
	}
	return &snapshotv1.CreateSnapshotResponse{}, err
}

func (w *world) GetSnapshot(_ context.Context, in *snapshotv1.GetSnapshotRequest, _ ...grpc.CallOption) (*snapshotv1.GetSnapshotResponse, error) {
	_, err := w.at("GetSnapshot")
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.snapshots {
		if s.GetSnapshotId() == in.GetSnapshotId() {
			return &snapshotv1.GetSnapshotResponse{Snapshot: s}, err
		}
	}
	return nil, status.Error(codes.NotFound, in.GetSnapshotId())
}

func (w *world) ListSnapshots(context.Context, *snapshotv1.ListSnapshotsRequest, ...grpc.CallOption) (*snapshotv1.ListSnapshotsResponse, error) {
	_, err := w.at("ListSnapshots")
	w.mu.Lock()
	defer w.mu.Unlock()
	resp := &snapshotv1.ListSnapshotsResponse{}
	resp.Snapshots = slices.Clone(w.snapshots)
	slices.Reverse(resp.Snapshots)
	return resp, err
}

func (w *world) PinSnapshot(_ context.Context, in *snapshotv1.PinSnapshotRequest, _ ...grpc.CallOption) (*snapshotv1.PinSnapshotResponse, error) {
	effect, err := w.at("PinSnapshot")
	w.mu.Lock()
	defer w.mu.Unlock()
	if effect {
		w.pinned = append(w.pinned, in.GetSnapshotId())
	}
	return &snapshotv1.PinSnapshotResponse{}, err
}

func (w *world) MaterializeSnapshot(_ context.Context, in *snapshotv1.MaterializeSnapshotRequest, _ ...grpc.CallOption) (*snapshotv1.MaterializeSnapshotResponse, error) {
	_, err := w.at("MaterializeSnapshot")
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.snapshots {
		if s.GetSnapshotId() == in.GetSnapshotId() {
			if err := os.MkdirAll(in.GetDirectory(), 0o700); err != nil {
				return nil, err
			}
			if err := os.WriteFile(filepath.Join(in.GetDirectory(), "digest"), []byte(s.GetWeightsDigest()), 0o600); err != nil {
				return nil, err
			}
			return &snapshotv1.MaterializeSnapshotResponse{Snapshot: s}, err
		}
	}
	return nil, status.Error(codes.NotFound, in.GetSnapshotId())
}

// Scheduler, store, events.

func (w *world) VerifyWorkers(_ context.Context, in *runv1.VerifyWorkersRequest, _ ...grpc.CallOption) (*runv1.VerifyWorkersResponse, error) {
	return &runv1.VerifyWorkersResponse{Accepted: slices.Repeat([]bool{true}, len(in.GetWorkers()))}, nil
}

func (w *world) CompleteRun(_ context.Context, in *runv1.CompleteRunRequest, _ ...grpc.CallOption) (*runv1.CompleteRunResponse, error) {
	effect, err := w.at("CompleteRun")
	if effect {
		w.mu.Lock()
		w.completed = append(w.completed, in)
		w.late = append(w.late, w.events[w.flushed:]...)
		w.mu.Unlock()
	}
	return &runv1.CompleteRunResponse{}, err
}

func (w *world) Admit(_ context.Context, run string, by *fencev1.Fence) error {
	return w.leaders.Admit(run, by)
}

func (w *world) Save(_ context.Context, d *Drive, by *fencev1.Fence) error {
	if err := w.leaders.Admit(run, by); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stored = d
	return nil
}

func (w *world) Get(context.Context, string) (*Drive, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stored == nil {
		return nil, ErrNotFound
	}
	return w.stored, nil
}

func (w *world) Delete(context.Context, string, *fencev1.Fence) error { return nil }

func (w *world) Active(context.Context) ([]*Drive, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stored != nil && w.stored.Active {
		return []*Drive{w.stored}, nil
	}
	return nil, nil
}

func (w *world) Emit(e *eventv1.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
}

func (w *world) Flush(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.flushed = len(w.events)
	return nil
}
