package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

const runID = "run-01kapq3n8jz3gq5p1cs0e8q0vd"

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func at(seconds float64) *timestamppb.Timestamp {
	return timestamppb.New(noon.Add(time.Duration(seconds * float64(time.Second))))
}

// fake is a control plane whose answers are set by the test. It records the calls that change
// something.
type fake struct {
	directory string             // of the run
	statuses  []*runv1.RunStatus // what WatchRun streams before it waits for finish
	history   []*eventv1.Event   // stored before a client watches
	events    []*eventv1.Event   // happen while a client watches
	models    []*gatewayv1.Model
	state     runv1.RunState // of the run that GetRun returns
	changed   bool           // the inputs of its plan have changed

	mu      sync.Mutex
	asked   []string
	filter  *storagev1.EventFilter // of the last TailEvents or ListEvents
	prompts []*inferencev1.Prompt
	params  *inferencev1.SamplingParams
	finish  chan runv1.RunState // ends WatchRun where it is not nil
	onAsk   func(what string)
	onWatch func() // after the statuses were sent
}

// A type for each service of the fake.
type (
	fakePlanner struct {
		planv1.UnimplementedPlannerServiceServer
		*fake
	}
	fakeScheduler struct {
		runv1.UnimplementedSchedulerServiceServer
		*fake
	}
	fakeBuffer struct {
		bufferv1.UnimplementedBufferServiceServer
		*fake
	}
	fakeSnapshots struct {
		snapshotv1.UnimplementedSnapshotServiceServer
		*fake
	}
	fakeEvents struct {
		storagev1.UnimplementedEventServiceServer
		*fake
	}
	fakeArtifacts struct {
		storagev1.UnimplementedArtifactServiceServer
		*fake
	}
	fakeGateway struct {
		gatewayv1.UnimplementedRolloutGatewayServiceServer
		*fake
	}
)

func (f *fake) Register(r grpc.ServiceRegistrar) {
	planv1.RegisterPlannerServiceServer(r, fakePlanner{fake: f})
	runv1.RegisterSchedulerServiceServer(r, fakeScheduler{fake: f})
	bufferv1.RegisterBufferServiceServer(r, fakeBuffer{fake: f})
	snapshotv1.RegisterSnapshotServiceServer(r, fakeSnapshots{fake: f})
	storagev1.RegisterEventServiceServer(r, fakeEvents{fake: f})
	storagev1.RegisterArtifactServiceServer(r, fakeArtifacts{fake: f})
	gatewayv1.RegisterRolloutGatewayServiceServer(r, fakeGateway{fake: f})
}

func (f *fake) ask(format string, args ...any) {
	f.mu.Lock()
	what := fmt.Sprintf(format, args...)
	f.asked = append(f.asked, what)
	f.mu.Unlock()
	if f.onAsk != nil {
		f.onAsk(what)
	}
}

func (f *fake) calls() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Join(f.asked, "\n")
}

func config() *configv1.RunConfig {
	return &configv1.RunConfig{
		Name: proto.String("addition-grpo"), Mode: proto.String("sync"), Seed: proto.Uint64(7),
		Model: &configv1.ModelConfig{Path: proto.String("models/tiny")}, Data: &configv1.DataConfig{Train: proto.String("train.jsonl")},
		Sampling:  &configv1.SamplingConfig{GroupSize: proto.Uint32(8)},
		Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Grpo{Grpo: &configv1.GrpoConfig{}}},
		Train:     &configv1.TrainConfig{Steps: proto.Uint64(3), GroupsPerStep: proto.Uint32(32), LearningRate: proto.Float64(1e-4)},
		Eval:      &configv1.EvalConfig{Temperature: proto.Float64(0.25)},
	}
}

func plan() *planv1.Plan {
	return &planv1.Plan{Format: 2, PlanId: "blake3-" + strings.Repeat("ab", 32), Config: config(), Inputs: []*planv1.Input{
		{Role: planv1.InputRole_INPUT_ROLE_TRAIN_DATA, Path: "train.jsonl", Digest: "blake3-" + strings.Repeat("cd", 32), Bytes: 354266, Rows: 9500},
	}}
}

func (f *fake) run(state runv1.RunState, step uint64) *runv1.Run {
	run := &runv1.Run{
		RunId: runID, Name: "addition-grpo", Plan: plan(), BaseDir: "/home/me/addition", State: state, CreateTime: at(0), Step: step, TotalSteps: 3,
		Directory: f.directory, Incarnation: 1,
	}
	if step > 0 {
		run.WeightsDirectory = f.directory + fmt.Sprintf("/weights/v%06d", step)
		run.WeightsDigest = "blake3-" + strings.Repeat("ef", 32)
	}
	switch state {
	case runv1.RunState_RUN_STATE_SUCCEEDED, runv1.RunState_RUN_STATE_CANCELLED:
		run.EndTime = at(63.4)
	case runv1.RunState_RUN_STATE_FAILED:
		run.EndTime, run.Reason = at(63.4), "WORKER_CRASH_LOOP"
		run.Message = "inference-0 left 6 times within ten minutes with code 1; its last lines:\nMemoryError: no room for the cache"
	}
	return run
}

// busy is the status in the middle of a run.
func (f *fake) busy() *runv1.RunStatus {
	return &runv1.RunStatus{
		Run: f.run(runv1.RunState_RUN_STATE_RUNNING, 1), Phase: "LEASING", WaitingFor: "12 groups of batch 2 from the inference workers",
		Queues: &runv1.Queues{InFlight: 12, Ready: 20, Consumed: 32, Excluded: 1},
		Workers: []*runv1.Worker{
			{WorkerId: "inference-0", Kind: "inference", Healthy: true, WeightsVersion: 1, Activity: "decodes 64 slots", SamplesPerSecond: 1140.4, TokensPerSecond: 12300, Pid: 4242},
			{WorkerId: "learner-0", Kind: "learner", Healthy: false, WeightsVersion: 1, Activity: "loads the model", Restarts: 2},
		},
		Cursor: &runv1.Cursor{Position: 64, Index: 64, Rows: 9500},
	}
}

func (f *fake) lookup(name string) (*runv1.RunStatus, error) {
	if name != runID && name != "addition-grpo" && name != "run-01" {
		return nil, rpcerr.New(codes.NotFound, "RUN_NOT_FOUND", "run %q does not exist", name).Fix("`rollout runs list` shows all runs")
	}
	if f.state == 0 || f.state == runv1.RunState_RUN_STATE_RUNNING {
		return f.busy(), nil
	}
	return &runv1.RunStatus{Run: f.run(f.state, 3)}, nil
}

func (f fakePlanner) ValidateConfig(_ context.Context, r *planv1.ValidateConfigRequest) (*planv1.ValidateConfigResponse, error) {
	f.ask("ValidateConfig %s %v", r.GetSource().GetFile(), r.GetSource().GetSet())
	return &planv1.ValidateConfigResponse{Config: config()}, nil
}

func (f fakePlanner) CreatePlan(_ context.Context, r *planv1.CreatePlanRequest) (*planv1.CreatePlanResponse, error) {
	f.ask("CreatePlan %v", r.GetSource().GetSet())
	return &planv1.CreatePlanResponse{Plan: plan(), Lock: []byte("the plan\n")}, nil
}

func (f fakePlanner) VerifyPlan(_ context.Context, r *planv1.VerifyPlanRequest) (*planv1.VerifyPlanResponse, error) {
	f.ask("VerifyPlan %s", r.GetLock())
	if f.changed {
		return &planv1.VerifyPlanResponse{Plan: plan(), Problems: []*planv1.Problem{{Reason: "INPUT_CHANGED", File: "reward.py", Message: "it differs from the plan"}}}, nil
	}
	return &planv1.VerifyPlanResponse{Plan: plan()}, nil
}

func (f fakeScheduler) CreateRun(_ context.Context, r *runv1.CreateRunRequest) (*runv1.CreateRunResponse, error) {
	origin := ""
	if r.GetFromSnapshot() != "" {
		origin = " from " + r.GetFromSnapshot()
	}
	f.ask("CreateRun %q key %t%s", r.GetLock(), r.GetIdempotencyKey() != "", origin)
	run := f.run(runv1.RunState_RUN_STATE_PENDING, 0)
	if r.GetFromSnapshot() != "" {
		run.RunId, run.FromSnapshot = "run-01kapqforked0000000000000", r.GetFromSnapshot()
	}
	return &runv1.CreateRunResponse{Run: run}, nil
}

func (f fakeScheduler) GetRun(_ context.Context, r *runv1.GetRunRequest) (*runv1.GetRunResponse, error) {
	status, err := f.lookup(r.GetRunId())
	return &runv1.GetRunResponse{Status: status}, err
}

// external is the id of a ledger without a run.
const external = "my-sampler-1"

// ExportLedger sends a ledger that lacks a step and has a damaged sample; of external, an intact
// one.
func (f fakeBuffer) ExportLedger(r *bufferv1.ExportLedgerRequest, stream grpc.ServerStreamingServer[bufferv1.ExportLedgerResponse]) error {
	if r.GetRunId() == external {
		return stream.Send(externalLedger())
	}
	if r.GetRunId() != runID {
		return rpcerr.New(codes.NotFound, "LEDGER_NOT_FOUND", "run %q has no ledger", r.GetRunId())
	}
	digest := func(n int) string { return fmt.Sprintf("blake3-%064x", n) }
	return stream.Send(&bufferv1.ExportLedgerResponse{
		Ledger: &bufferv1.LedgerRecord{
			Config: &bufferv1.LedgerConfig{GroupsPerStep: 1, GroupSize: 1, Rows: 9500, Order: bufferv1.LeaseOrder_LEASE_ORDER_POSITION},
			State:  &bufferv1.LedgerState{Step: 2, Consumed: 1}, Chain: digest(7),
		},
		Segments: []*bufferv1.SegmentRecord{{Number: 1, Bytes: 100, FileBytes: 100, Flaw: "a record has another checksum", FlawOffset: 8}},
		Steps:    []*bufferv1.StepRecord{{Step: 2, BatchId: digest(3), WeightsDigest: digest(2), Groups: 1, Samples: 1, Chain: digest(7)}},
		Weights:  []*bufferv1.WeightsRecord{{Version: 2, Digest: digest(2)}},
		Groups: []*bufferv1.GroupRecord{{Key: &bufferv1.GroupKey{Index: 1}, Position: 1, State: bufferv1.GroupState_GROUP_STATE_CONSUMED,
			Step: 2, Samples: 1}},
		Samples: []*bufferv1.SampleRecord{{Segment: 1, Flaw: "segment 1 at byte 16: another checksum", Ref: &bufferv1.SampleRef{
			Key: &trajectoryv1.TrajectoryKey{RunId: runID, Index: 1}, Offset: 16, Length: 84, Outcome: trajectoryv1.Outcome_OUTCOME_COMPLETED}}},
	})
}

// externalLedger has one group, which no step has taken yet.
func externalLedger() *bufferv1.ExportLedgerResponse {
	key := &trajectoryv1.TrajectoryKey{RunId: external}
	return &bufferv1.ExportLedgerResponse{
		Ledger: &bufferv1.LedgerRecord{
			Config: &bufferv1.LedgerConfig{GroupsPerStep: 1, GroupSize: 1, Rows: 10, Order: bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION},
			State:  &bufferv1.LedgerState{Ready: 1, Duplicates: 2},
		},
		Segments: []*bufferv1.SegmentRecord{{Number: 1, Bytes: 100, FileBytes: 100}},
		Groups:   []*bufferv1.GroupRecord{{Key: &bufferv1.GroupKey{}, State: bufferv1.GroupState_GROUP_STATE_READY, Samples: 1}},
		Samples: []*bufferv1.SampleRecord{{Segment: 1, Key: key, Ref: &bufferv1.SampleRef{
			Key: key, Offset: 16, Length: 84, Outcome: trajectoryv1.Outcome_OUTCOME_COMPLETED}}},
	}
}

func (f fakeScheduler) ListRuns(_ context.Context, r *runv1.ListRunsRequest) (*runv1.ListRunsResponse, error) {
	f.ask("ListRuns %v %d", r.GetStates(), r.GetPageSize())
	runs := []*runv1.Run{f.run(runv1.RunState_RUN_STATE_RUNNING, 1)}
	if len(r.GetStates()) == 0 {
		old := f.run(runv1.RunState_RUN_STATE_SUCCEEDED, 3)
		old.RunId, old.Name, old.TotalSteps, old.Step = "run-01kapq0000000000000000000", "addition-sft", 1200, 1200
		runs = append(runs, old)
	}
	if slices.Contains(r.GetStates(), runv1.RunState_RUN_STATE_FAILED) {
		runs = nil
	}
	return &runv1.ListRunsResponse{Runs: runs}, nil
}

func (f fakeScheduler) CancelRun(_ context.Context, r *runv1.CancelRunRequest) (*runv1.CancelRunResponse, error) {
	f.ask("CancelRun %s drain %t", r.GetRunId(), r.GetDrain())
	return &runv1.CancelRunResponse{Run: f.run(runv1.RunState_RUN_STATE_DRAINING, 1)}, nil
}

func (f fakeScheduler) PauseRun(_ context.Context, r *runv1.PauseRunRequest) (*runv1.PauseRunResponse, error) {
	f.ask("PauseRun %s", r.GetRunId())
	return &runv1.PauseRunResponse{Run: f.run(runv1.RunState_RUN_STATE_PAUSED, 1)}, nil
}

func (f fakeScheduler) ResumeRun(_ context.Context, r *runv1.ResumeRunRequest) (*runv1.ResumeRunResponse, error) {
	f.ask("ResumeRun %s", r.GetRunId())
	if f.state == runv1.RunState_RUN_STATE_SUCCEEDED && f.statuses == nil {
		return nil, rpcerr.New(codes.FailedPrecondition, "RUN_NOT_RESUMABLE", "the run %s has made all its steps", r.GetRunId())
	}
	if f.changed {
		return nil, planChanged("rollout run --resume " + r.GetRunId() + " --accept-changes")
	}
	return &runv1.ResumeRunResponse{Run: f.run(runv1.RunState_RUN_STATE_STARTING, 1)}, nil
}

// planChanged is the error for inputs that have changed; way is the command for a new run.
func planChanged(way string) error {
	return rpcerr.New(codes.FailedPrecondition, "PLAN_INPUTS_CHANGED", "2 inputs of the plan have changed since the plan was made").
		Fix("restore them, or continue in a new run: `"+way+"`").
		Field("reward.py", "the source of the reward changed").Field("packages.torch", "the plan was made with torch 2.14.0, but 2.15.0 is installed")
}

func (f fakePlanner) RenewPlan(_ context.Context, r *planv1.RenewPlanRequest) (*planv1.RenewPlanResponse, error) {
	name := r.GetPlan().GetConfig().GetName()
	if len(r.GetSet()) > 0 {
		name += " with " + strings.Join(r.GetSet(), " ")
	}
	f.ask("RenewPlan %s in %s", name, r.GetBaseDir())
	renewed := plan()
	renewed.Inputs[0].Digest = "blake3-" + strings.Repeat("99", 32)
	renewed.Inputs = append(renewed.Inputs, &planv1.Input{Role: planv1.InputRole_INPUT_ROLE_REWARD, Path: "grade.py", Digest: "blake3-" + strings.Repeat("77", 32)})
	return &planv1.RenewPlanResponse{Plan: renewed, Lock: []byte("the new plan\n")}, nil
}

func (f fakeScheduler) WatchRun(_ *runv1.WatchRunRequest, stream grpc.ServerStreamingServer[runv1.WatchRunResponse]) error {
	for _, status := range f.statuses {
		if err := stream.Send(&runv1.WatchRunResponse{Status: status}); err != nil {
			return err
		}
	}
	if f.onWatch != nil {
		f.onWatch()
	}
	if f.finish == nil {
		return nil
	}
	select {
	case state := <-f.finish:
		return stream.Send(&runv1.WatchRunResponse{Status: &runv1.RunStatus{Run: f.run(state, 2)}})
	case <-stream.Context().Done():
		return stream.Context().Err()
	}
}

func (f fakeEvents) ListEvents(_ context.Context, r *storagev1.ListEventsRequest) (*storagev1.ListEventsResponse, error) {
	f.mu.Lock()
	f.filter = r.GetFilter()
	f.mu.Unlock()
	events := slices.DeleteFunc(slices.Clone(f.history), func(e *eventv1.Event) bool {
		return e.GetLevel() < r.GetFilter().GetMinLevel() || len(r.GetFilter().GetKinds()) > 0 && !slices.Contains(r.GetFilter().GetKinds(), e.GetKind())
	})
	events = slices.DeleteFunc(events, func(e *eventv1.Event) bool { return e.GetSequence() <= r.GetFilter().GetAfterSequence() })
	if limit := int(r.GetPageSize()); limit > 0 && r.GetNewest() {
		events = events[max(0, len(events)-limit):]
	} else if limit > 0 {
		events = events[:min(limit, len(events))]
	}
	return &storagev1.ListEventsResponse{Events: events}, nil
}

func (f fakeEvents) TailEvents(r *storagev1.TailEventsRequest, stream grpc.ServerStreamingServer[storagev1.TailEventsResponse]) error {
	f.mu.Lock()
	f.filter = r.GetFilter()
	f.mu.Unlock()
	for _, e := range append(slices.Clone(f.history), f.events...) {
		if e.GetSequence() <= r.GetFilter().GetAfterSequence() || e.GetLevel() < r.GetFilter().GetMinLevel() {
			continue
		}
		if err := stream.Send(&storagev1.TailEventsResponse{Events: []*eventv1.Event{e}}); err != nil {
			return err
		}
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (f fakeEvents) QueryMetrics(context.Context, *storagev1.QueryMetricsRequest) (*storagev1.QueryMetricsResponse, error) {
	byName := map[string]*storagev1.Series{}
	for _, e := range append(slices.Clone(f.history), f.events...) {
		for name, value := range e.GetMetrics() {
			if byName[name] == nil {
				byName[name] = &storagev1.Series{Name: name}
			}
			byName[name].Points = append(byName[name].Points, &storagev1.Point{Step: e.GetStep(), Value: value, Time: e.GetTime()})
		}
	}
	response := &storagev1.QueryMetricsResponse{}
	for _, series := range byName {
		response.Series = append(response.Series, series)
	}
	return response, nil
}

func (f fakeEvents) QueryTelemetry(r *storagev1.QueryTelemetryRequest, stream grpc.ServerStreamingServer[storagev1.QueryTelemetryResponse]) error {
	f.ask("QueryTelemetry %s %v %v every %d s", r.GetRunId(), r.GetServices(), r.GetNames(), r.GetResolutionSeconds())
	return stream.Send(&storagev1.QueryTelemetryResponse{Series: &storagev1.TelemetrySeries{
		Service: "inference-worker/inference-0", Name: "tokens_per_second", Buckets: []*storagev1.TelemetryBucket{
			{Time: at(0), Seconds: 300, Count: 300, Min: 11000, Mean: 12300.5, Max: 13000}, {Time: at(300), Seconds: 60, Count: 60, Min: 0.25, Mean: 0.5, Max: 1},
		},
	}})
}

func snapshot() *snapshotv1.Snapshot {
	return &snapshotv1.Snapshot{
		SnapshotId: "snap-01kapq5q5mz3gq5p1cs0e8q0vd", RunId: runID, Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, Step: 3,
		WeightsDigest: "blake3-" + strings.Repeat("ef", 32), Cursor: &runv1.Cursor{Position: 96, Index: 96, Rows: 9500}, PlanId: plan().GetPlanId(),
		CreateTime: at(63), Bytes: 9_600_000,
		Files: []*snapshotv1.SnapshotFile{
			{Path: "weights/model.safetensors", Digest: "blake3-" + strings.Repeat("12", 32), Bytes: 3_183_848},
			{Path: "optimizer.safetensors", Digest: "blake3-" + strings.Repeat("34", 32), Bytes: 6_416_152},
		},
	}
}

// named is a snapshot that a program other than the run took.
func named() *snapshotv1.Snapshot {
	return &snapshotv1.Snapshot{
		SnapshotId: "snap-01kapq7q5mz3gq5p1cs0e8q0vd", RunId: runID, Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_EPISODIC, Step: 3,
		PlanId: plan().GetPlanId(), CreateTime: at(70), Name: "tools-1",
	}
}

func (f fakeArtifacts) GetArtifact(_ *storagev1.GetArtifactRequest, stream grpc.ServerStreamingServer[storagev1.GetArtifactResponse]) error {
	return stream.Send(&storagev1.GetArtifactResponse{Chunk: []byte("kept")})
}

func (f fakeSnapshots) ListSnapshots(_ context.Context, r *snapshotv1.ListSnapshotsRequest) (*snapshotv1.ListSnapshotsResponse, error) {
	f.ask("ListSnapshots %q", r.GetRunId())
	return &snapshotv1.ListSnapshotsResponse{Snapshots: []*snapshotv1.Snapshot{snapshot(), named()}}, nil
}

func (f fakeSnapshots) GetSnapshot(_ context.Context, r *snapshotv1.GetSnapshotRequest) (*snapshotv1.GetSnapshotResponse, error) {
	for _, s := range []*snapshotv1.Snapshot{snapshot(), named()} {
		if strings.HasPrefix(s.GetSnapshotId(), r.GetSnapshotId()) {
			return &snapshotv1.GetSnapshotResponse{Snapshot: s}, nil
		}
	}
	return nil, rpcerr.New(codes.NotFound, "SNAPSHOT_NOT_FOUND", "snapshot %q does not exist", r.GetSnapshotId()).Fix("`rollout snapshot list` shows all snapshots")
}

// TakeSnapshots refuses episodes, which the run of plan does not have.
func (f fakeSnapshots) TakeSnapshots(_ context.Context, r *snapshotv1.TakeSnapshotsRequest) (*snapshotv1.TakeSnapshotsResponse, error) {
	f.ask("TakeSnapshots %v", r.GetKinds())
	if slices.Contains(r.GetKinds(), snapshotv1.SnapshotKind_SNAPSHOT_KIND_EPISODIC) {
		return nil, rpcerr.New(codes.FailedPrecondition, "EPISODES_NOT_SAVED", "the environment guess.py:Guess of %s saves no episodes", r.GetRunId()).Fix("define `state_dict(self)`")
	}
	return &snapshotv1.TakeSnapshotsResponse{Snapshots: []*snapshotv1.Snapshot{snapshot()}}, nil
}

func (f fakeSnapshots) DeleteSnapshot(_ context.Context, r *snapshotv1.DeleteSnapshotRequest) (*snapshotv1.DeleteSnapshotResponse, error) {
	f.ask("DeleteSnapshot %s", r.GetSnapshotId())
	return &snapshotv1.DeleteSnapshotResponse{}, nil
}

// RecoverSnapshots adds two snapshots, knows another, and lacks a file of a fourth; older ones are
// first.
func (f fakeSnapshots) RecoverSnapshots(_ context.Context, r *snapshotv1.RecoverSnapshotsRequest) (*snapshotv1.RecoverSnapshotsResponse, error) {
	f.ask("RecoverSnapshots %q in %q", r.GetRunId(), r.GetBaseDir())
	older, added, broken := snapshot(), snapshot(), snapshot()
	older.SnapshotId, older.Step = "snap-01kapq3q5mz3gq5p1cs0e8q0vd", 3
	added.Origin = &snapshotv1.Origin{BaseDir: "/nowhere/addition"}
	broken.SnapshotId, broken.Step = "snap-01kapq2q5mz3gq5p1cs0e8q0vd", 2
	return &snapshotv1.RecoverSnapshotsResponse{Snapshots: []*snapshotv1.RecoveredSnapshot{
		{Snapshot: broken, Problem: "its file optimizer.safetensors is not in the bucket"}, {Snapshot: older}, {Snapshot: added}, {Snapshot: named(), Known: true},
	}}, nil
}

// DeleteRun refuses active runs. The fork keeps a snapshot.
func (f fakeScheduler) DeleteRun(_ context.Context, r *runv1.DeleteRunRequest) (*runv1.DeleteRunResponse, error) {
	if !r.GetDryRun() {
		f.ask("DeleteRun %s", r.GetRunId())
	}
	status, err := f.lookup(r.GetRunId())
	if err != nil {
		return nil, err
	}
	if run := status.GetRun(); run.GetState() == runv1.RunState_RUN_STATE_RUNNING {
		return nil, rpcerr.New(codes.FailedPrecondition, "RUN_ACTIVE", "run %s is RUNNING and cannot be deleted", run.GetRunId()).
			Fix("cancel it first: `rollout runs cancel " + run.GetRunId() + "`")
	}
	return &runv1.DeleteRunResponse{Run: status.GetRun(), KeptSnapshots: []string{snapshot().GetSnapshotId()}}, nil
}

func (f fakeSnapshots) RestoreSnapshot(_ context.Context, r *snapshotv1.RestoreSnapshotRequest) (*snapshotv1.RestoreSnapshotResponse, error) {
	f.ask("RestoreSnapshot %s", r.GetSnapshotId())
	if f.changed {
		return nil, planChanged("rollout snapshot restore " + r.GetSnapshotId() + " --accept-changes")
	}
	run := f.run(runv1.RunState_RUN_STATE_PENDING, 0)
	run.RunId, run.FromSnapshot = "run-01kapqrestored00000000000", r.GetSnapshotId()
	return &snapshotv1.RestoreSnapshotResponse{Run: run}, nil
}

func (f fakeGateway) ListModels(context.Context, *gatewayv1.ListModelsRequest) (*gatewayv1.ListModelsResponse, error) {
	return &gatewayv1.ListModelsResponse{Models: f.models}, nil
}

func (f fakeGateway) Complete(r *gatewayv1.CompleteRequest, stream grpc.ServerStreamingServer[gatewayv1.CompleteResponse]) error {
	f.mu.Lock()
	f.prompts, f.params = append(f.prompts, r.GetPrompts()...), r.GetParams()
	f.mu.Unlock()
	f.ask("Complete %s session %q", r.GetModel(), r.GetSessionId())
	for _, text := range []string{"4", "2", "\x1b[2J!"} {
		if err := stream.Send(&gatewayv1.CompleteResponse{SessionId: "s1", Model: r.GetModel(), Piece: &inferencev1.GenerateResponse{Text: text}}); err != nil {
			return err
		}
	}
	return nil
}

// episodeJSON is a stored episode of three turns: one calls tools, one is not trained on.
const episodeJSON = `{"epoch":1,"index":7,"sample":2,"prompt":"","completion":"","reward":1,"advantage":0.25,"tokens":11,"truncated":false,
	"outcome":"COMPLETED","metrics":{"episode/turns":3},"prompt_tokens":4,
	"turns":[
		{"sampled":false,"start":0,"end":4,"messages":[{"role":"system","content":"Use tools."},{"role":"user","content":"17+25?"}]},
		{"sampled":true,"start":4,"end":7,"reward":0.5,"metrics":{"tools/calls":2},"messages":[{"role":"assistant","content":"","reasoning_content":"add them",
			"tool_calls":[{"id":"a","function":{"name":"add","arguments":"{\"a\": 17, \"b\": 25}"}},{"id":"b","function":{"name":"now","arguments":{}}}]}]},
		{"sampled":false,"start":7,"end":10,"messages":[{"role":"tool","name":"add","tool_call_id":"a","content":"42"},{"role":"tool","name":"now","content":[{"type":"text","text":"noon"}]}]},
		{"sampled":true,"start":10,"end":12,"messages":[{"role":"assistant","content":"\u001b[2J<b>42</b>"}]},
		{"sampled":false,"start":12,"end":13,"text":"sure?"},
		{"sampled":true,"start":13,"end":15,"text":"yes"}],
	"times":{"began_unix_ms":1790000000000,"turns":[
		{"asked_ms":4,"sampled_ms":854,"answered_ms":3400,"tool_ms":[12,2500]},{"asked_ms":3400,"sampled_ms":4000,"answered_ms":4030},{"asked_ms":4030,"sampled_ms":4500}]},
	"spans":[{"version":1,"start":0,"end":3},{"version":2,"start":3,"end":11}],
	"token_ids":[11,12,13,21,22,23,31,32,41,51],"logprobs":[-0.5,-0.25,-0.125,0,0,0,-1,-2,0,-3],"trained":[[0,3],[9,10]]}`

// keptStory is the story of a run with the completions of two steps; the first was committed twice.
func keptStory() []*eventv1.Event {
	events := story()
	for i, k := range []struct {
		step uint64
		text string
	}{
		{1, `[{"epoch":0,"index":4,"sample":0,"prompt":"17+25=","completion":"41","reward":0,"advantage":-0.5,"tokens":3},
			{"epoch":0,"index":4,"sample":1,"prompt":"17+25=","completion":"\u001b[2J<b>42</b>","reward":1,"advantage":0.5,"tokens":4,"truncated":true}]`},
		{1, `[{"epoch":0,"index":4,"sample":0,"prompt":"again","completion":"","reward":0,"tokens":1}]`},
		{3, `[{"epoch":1,"index":0,"sample":0,"prompt":"1+1=","completion":"2","reward":1,"advantage":null,"tokens":2},
			{"epoch":1,"index":1,"sample":0,"prompt":"1+2=","completion":"4","reward":0,"advantage":null,"tokens":2},
			` + episodeJSON + `]`},
	} {
		n := len(events) + 1
		events = append(events, &eventv1.Event{
			Sequence: uint64(n), EventId: fmt.Sprintf("c%d", i), RunId: runID, Time: at(3), Service: "learner-controller",
			Level: eventv1.Level_LEVEL_DEBUG, Kind: "completions", Step: k.step, Attributes: map[string]string{"completions": k.text},
		})
	}
	return events
}

// collapse is what the health check found at step 3 of the story.
func collapse() *eventv1.Event {
	return &eventv1.Event{
		Sequence: 90, EventId: "collapse", RunId: runID, Time: at(9), Service: "learner-controller", Step: 3,
		Kind: "health.collapse", Level: eventv1.Level_LEVEL_WARN,
		Message: "the reward collapsed: a mean of 0.02. Likely cause: the learning rate is too high (1 at this step). Fix: lower it",
	}
}

// story has the events of a run of three steps.
func story() []*eventv1.Event {
	step := func(n uint64, seconds, reward float64) *eventv1.Event {
		return &eventv1.Event{
			Time: at(seconds), Service: "learner-controller", Level: eventv1.Level_LEVEL_INFO, Kind: "step.committed", Step: n, Message: "step committed",
			Metrics: map[string]float64{
				"loss": 0.0123 / float64(n), "reward/mean": reward, "entropy": 0.43, "grad_norm": 1.5, "samples_per_second": 1140.4, "tokens_per_second": 12300,
				"time/step": 0.22, "mismatch/kl": 1e-5, "learning_rate": 1e-4,
			},
		}
	}
	eval := func(n uint64, seconds, reward float64, answers ...string) *eventv1.Event {
		var samples []string
		for i, answer := range answers {
			sample, _ := json.Marshal(map[string]any{
				"row": i, "prompt": fmt.Sprintf("%d+1=", i), "completion": answer, "reward": map[bool]int{true: 1}[answer == fmt.Sprint(i+1)],
			})
			samples = append(samples, string(sample))
		}
		return &eventv1.Event{
			Time: at(seconds), Service: "learner-controller", Level: eventv1.Level_LEVEL_INFO, Kind: "eval.finished", Step: n,
			Attributes: map[string]string{"samples": "[" + strings.Join(samples, ",") + "]"},
			Metrics:    map[string]float64{"eval/reward": reward, "eval/accuracy": reward - 0.01, "eval/samples": 256},
		}
	}
	events := []*eventv1.Event{
		{Time: at(0), Service: "scheduler", Level: eventv1.Level_LEVEL_INFO, Kind: "run.state", Attributes: map[string]string{"state": "STARTING"}},
		{Time: at(1), Service: "scheduler", Level: eventv1.Level_LEVEL_INFO, Kind: "worker.started", Attributes: map[string]string{"worker": "inference-0", "pid": "4242"}},
		eval(0, 2, 0.512, "7", "2", "1\x1b[2J", "x", "5", "9"),
		step(1, 3, 0.5),
		{Time: at(4), Service: "inference-worker/inference-0", Level: eventv1.Level_LEVEL_WARN, Kind: "log", Message: "the reward took 4.2 s of its 5 s"},
		step(2, 5, 0.7),
		{Time: at(5.5), Service: "scheduler", Level: eventv1.Level_LEVEL_DEBUG, Kind: "log", Message: "unknown sees this"},
		step(3, 7, 0.9),
		eval(3, 8, 0.934, "1", "2", "3", "4", "5", "7"),
		{Time: at(9), Service: "snapshot", Level: eventv1.Level_LEVEL_INFO, Kind: "snapshot.created", Step: 3, Attributes: map[string]string{"snapshot": "snap-01kapq5q5m"}, Metrics: map[string]float64{"bytes": 9.6e6}},
		{Time: at(10), Service: "scheduler", Level: eventv1.Level_LEVEL_INFO, Kind: "run.state", Attributes: map[string]string{"state": "SUCCEEDED"}},
	}
	for i, e := range events {
		e.Sequence, e.EventId, e.RunId = uint64(i+1), fmt.Sprintf("e%d", i), runID
	}
	return events
}
