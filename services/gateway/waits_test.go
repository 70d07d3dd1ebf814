package gateway_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// waits lists the waits of a run, each of which must be complete.
func waits(t *testing.T, s *gateway.Server, run string) map[string]*waitv1.Wait {
	t.Helper()
	got, err := s.ListWaits(t.Context(), &gatewayv1.ListWaitsRequest{RunId: run})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*waitv1.Wait{}
	for _, w := range got.GetWaits() {
		if w.GetOwner() == "" || w.GetEvidence() == "" || w.GetFix() == "" {
			t.Errorf("incomplete: %v", w)
		}
		out[w.GetReason()] = w
	}
	return out
}

// eventually waits until a run has a wait with a reason.
func eventually(t *testing.T, s *gateway.Server, run, reason string) *waitv1.Wait {
	t.Helper()
	tick, late := time.NewTicker(10*time.Millisecond), time.After(30*time.Second)
	defer tick.Stop()
	for {
		if found := waits(t, s, run)[reason]; found != nil {
			return found
		}
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("no %s: %v", reason, waits(t, s, run))
		}
	}
}

func TestRequestsWithoutAWorkerAreWaits(t *testing.T) {
	t.Parallel()
	next, running := make(chan struct{}), atomic.Int32{}
	s, _ := serve(t, gateway.Config{QueueTimeout: time.Minute}, blocking(next, &running))
	if got := waits(t, s, "run-tiny"); len(got) != 0 {
		t.Fatalf("an idle gateway waits for %v", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 8)
	ask := func(req *gatewayv1.CompleteRequest) {
		req.Prompts = textPrompts("a")
		done <- s.Complete(req, &collected{ctx: ctx})
	}
	for range 4 {
		go ask(&gatewayv1.CompleteRequest{})
	}
	full := eventually(t, s, "run-tiny", "SLOT")
	if full.GetOwner() != "worker" || full.GetSince() == nil {
		t.Errorf("got %v", full)
	}
	go ask(&gatewayv1.CompleteRequest{MinWeightsVersion: proto.Uint64(99)})
	if old := eventually(t, s, "run-tiny", "WEIGHTS"); old.GetOwner() != "learner-controller" || old.GetEvidence() != "1 request waits for other weights than the inference workers serve (version 12)" {
		t.Errorf("got %v", old)
	}
	if got := waits(t, s, "run-other"); len(got) != 0 {
		t.Errorf("another run waits for %v", got)
	}
	cancel()
	close(next)
	for range 5 {
		if err := <-done; err != nil && ctx.Err() == nil {
			t.Error(err)
		}
	}
}

func TestWhatAgentsAreWaitedForIsAWait(t *testing.T) {
	t.Parallel()
	a := setup(t, func(*configv1.RunConfig) {})
	absent := waits(t, a.gateway, agencyRun)["NO_AGENT"]
	if absent.GetOwner() != "agents" || absent.GetEvidence() != "no agent asks for prompts, and none has since the gateway started" {
		t.Errorf("got %v", absent)
	}
	asking, stop := context.WithCancel(t.Context())
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		_, _ = a.gateway.NextPrompts(asking, &gatewayv1.NextPromptsRequest{Model: "tiny", MaxGroups: 1, WaitSeconds: 30})
	}()
	if none := eventually(t, a.gateway, agencyRun, "NOT_WITH_WORKERS"); none.GetOwner() != "nats" {
		t.Errorf("got %v", none)
	}
	stop()
	<-asked
	a.publish(3)
	tasks := a.next()
	open := waits(t, a.gateway, agencyRun)["SESSIONS_OPEN"]
	if open.GetOwner() != "agents" || open.GetGroups() != 1 || open.GetLimitSeconds() != 600 || open.GetSince() == nil {
		t.Errorf("got %v", open)
	}
	if want := tasks[0].GetSessionId() + " has made no request"; !strings.Contains(open.GetEvidence(), want) {
		t.Errorf("got %q, not %q", open.GetEvidence(), want)
	}
	samples := a.worker.generate
	a.worker.generate = func(*inferencev1.GenerateRequest, grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
		return rpcerr.New(codes.InvalidArgument, "CONTEXT_OVERFLOW", "the prompt has 90 tokens, and model.max_model_len is 64")
	}
	request := &gatewayv1.CompleteRequest{
		Model: "tiny", SessionId: tasks[1].GetSessionId(), Params: &inferencev1.SamplingParams{}, Prompts: []*inferencev1.Prompt{tokens(1)},
	}
	if err := a.gateway.Complete(request, &collected{ctx: t.Context()}); rpcerr.Reason(err) != "CONTEXT_OVERFLOW" {
		t.Fatalf("got %v", err)
	}
	a.worker.generate = samples
	refused := waits(t, a.gateway, agencyRun)["SESSIONS_OPEN"]
	if want := tasks[1].GetSessionId() + " had its last request refused at "; !strings.Contains(refused.GetEvidence(), want) || !strings.Contains(refused.GetEvidence(), "CONTEXT_OVERFLOW: the prompt has 90 tokens") || !strings.Contains(refused.GetFix(), "refused") {
		t.Errorf("got %q, not %q", refused, want)
	}
	for i, task := range tasks {
		a.play(task)
		open := waits(t, a.gateway, agencyRun)["SESSIONS_OPEN"]
		if want := task.GetSessionId() + " had its last answer at "; !strings.Contains(open.GetEvidence(), want) {
			t.Errorf("got %q, not %q", open.GetEvidence(), want)
		}
		if i > 0 && strings.Contains(open.GetEvidence(), tasks[0].GetSessionId()) {
			t.Errorf("names a closed session: %q", open.GetEvidence())
		}
		if _, err := a.close(task, 1); err != nil {
			t.Fatal(err)
		}
	}
	if gone := eventually(t, a.gateway, agencyRun, "NO_AGENT"); gone.GetSince() == nil {
		t.Errorf("got %v", gone)
	}
}
