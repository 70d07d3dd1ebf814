package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// stalledPlane is a control plane whose run waits for a reward. gone are the services that do not
// answer.
type stalledPlane struct {
	*fake
	gone string
}

type (
	stalledScheduler struct {
		fakeScheduler
		gone string
	}
	stalledBuffer struct {
		fakeBuffer
		gone string
	}
)

func (p stalledPlane) Register(r grpc.ServiceRegistrar) {
	runv1.RegisterSchedulerServiceServer(r, stalledScheduler{fakeScheduler{fake: p.fake}, p.gone})
	bufferv1.RegisterBufferServiceServer(r, stalledBuffer{fakeBuffer{fake: p.fake}, p.gone})
}

func (s stalledScheduler) GetRun(_ context.Context, r *runv1.GetRunRequest) (*runv1.GetRunResponse, error) {
	if strings.Contains(s.gone, "scheduler") {
		return nil, status.Error(codes.Unavailable, "connection refused")
	}
	worker := &runv1.Worker{WorkerId: "inference-0", Kind: "inference", Healthy: true}
	if r.GetInFlight() {
		worker.Waits = []*waitv1.Wait{{
			Owner: "judge.py:judge", Reason: "REWARD_CALL", Since: at(13), LimitSeconds: 60, Positions: []uint64{88, 91}, Groups: 2,
			Evidence: "the reward call to judge.py:judge has taken 47 s of 60 s", Fix: "see why it is slow: `rollout logs worker " + runID + " inference-0`",
		}}
	}
	return &runv1.GetRunResponse{Status: &runv1.RunStatus{
		Run: s.run(runv1.RunState_RUN_STATE_RUNNING, 1), Phase: "LEASING", Cursor: &runv1.Cursor{Position: 96}, Workers: []*runv1.Worker{worker},
		Waits: []*waitv1.Wait{{Owner: "worker", Reason: "GROUPS_MISSING", Since: at(10), Evidence: "2 of 32 groups of step 2 (inference workers)"}},
	}}, nil
}

func (b stalledBuffer) ListIncompleteGroups(_ context.Context, r *bufferv1.ListIncompleteGroupsRequest) (*bufferv1.ListIncompleteGroupsResponse, error) {
	if r.GetEndPosition() != 96 {
		return nil, status.Errorf(codes.InvalidArgument, "end %d", r.GetEndPosition())
	}
	if strings.Contains(b.gone, "buffer") {
		return nil, status.Error(codes.Unavailable, "connection refused")
	}
	return &bufferv1.ListIncompleteGroupsResponse{Groups: []*bufferv1.GroupRecord{
		{Position: 88, State: bufferv1.GroupState_GROUP_STATE_OPEN}, {Position: 91, State: bufferv1.GroupState_GROUP_STATE_OPEN},
	}}, nil
}

func TestExplainPrintsTheChainAndWhatDoesNotAnswer(t *testing.T) {
	for name, c := range map[string]struct {
		gone string
		args []string
	}{
		"whole": {}, "json": {args: []string{"--format", "json"}}, "no-buffer": {gone: "buffer"}, "no-scheduler": {gone: "scheduler"},
	} {
		t.Run(name, func(t *testing.T) {
			f := stalledPlane{&fake{directory: "/state/runs/" + runID}, c.gone}
			p := newPlane(t, f, eventsOnly{&fake{history: story()}})
			got := call{plane: p, now: func() time.Time { return noon.Add(60 * time.Second) }}.run(t, append([]string{"explain", runID, "-n", "3", "--server", "here"}, c.args...)...)
			golden(t, "testdata/explain/"+name+".text", got.text())
		})
	}
}

// eventsOnly is the service of events alone.
type eventsOnly struct{ *fake }

func (e eventsOnly) Register(r grpc.ServiceRegistrar) {
	storagev1.RegisterEventServiceServer(r, fakeEvents{fake: e.fake})
}

// With --watch, each line has the message that a command without it prints.
func TestAWatchedExplanationIsTheSameMessage(t *testing.T) {
	t.Parallel()
	p := newPlane(t, &fake{state: runv1.RunState_RUN_STATE_FAILED, history: story()})
	got := call{plane: p, now: func() time.Time { return noon.Add(60 * time.Second) }}.run(t, "explain", runID, "--watch", "--format", "json", "--server", "here")
	var found waitv1.Explanation
	if err := protojson.Unmarshal([]byte(got.stdout), &found); err != nil || found.GetRunId() != runID || len(found.GetChain()) == 0 {
		t.Errorf("%v in %s", err, got.text())
	}
}
