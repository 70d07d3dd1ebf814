package gateway_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// open starts a stream and reads its first line.
func open(t *testing.T, s *gateway.Server) *bufio.Reader {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL()+"/v1/completions", strings.NewReader(`{"model":"tiny","prompt":"a","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	body := bufio.NewReader(resp.Body)
	if line, err := body.ReadString('\n'); err != nil || !strings.Contains(line, "one") {
		t.Fatalf("the stream begins with %q, %v", line, err)
	}
	return body
}

func TestWorkerThatLeavesTheRegistryFinishesItsRequests(t *testing.T) {
	t.Parallel()
	worker := &fakeWorker{model: "tiny", resume: make(chan struct{}), deregistered: make(chan struct{})}
	s, _ := serve(t, gateway.Config{}, worker)
	body := open(t, s)
	close(worker.deregistered)
	for deadline := time.Now().Add(time.Minute); ; {
		listed, err := s.ListModels(t.Context(), &gatewayv1.ListModelsRequest{})
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("the gateway lists %s, %v", listed, err)
		}
		if len(listed.GetModels()) == 0 {
			break
		}
	}
	if resp, answer := do(t, s, "POST", "/v1/completions", `{"model":"tiny","prompt":"a"}`, ""); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("a draining worker got a new request: %s %s", resp.Status, answer)
	}
	close(worker.resume)
	rest, err := io.ReadAll(body)
	if err != nil || !strings.Contains(string(rest), " three") || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("the stream ends with %q, %v", rest, err)
	}
}

// pieces is the stream of a gRPC caller.
type pieces struct {
	grpc.ServerStreamingServer[gatewayv1.CompleteResponse]
	ctx   context.Context
	begun chan struct{}
}

func (p pieces) Context() context.Context { return p.ctx }

func (p pieces) Send(*gatewayv1.CompleteResponse) error {
	select {
	case p.begun <- struct{}{}:
	default:
	}
	return nil
}

// The gateway ends before the gRPC server. It finishes calls in flight and refuses new ones.
func TestTheGatewayFinishesCallsInFlight(t *testing.T) {
	t.Parallel()
	worker := &fakeWorker{model: "tiny", resume: make(chan struct{})}
	s, _, end := run(t, gateway.Config{}, worker)
	answers := make(chan error, 1)
	begun := make(chan struct{}, 1)
	call := &gatewayv1.CompleteRequest{Model: "tiny", N: 1, Stream: true, Params: &inferencev1.SamplingParams{}, Prompts: []*inferencev1.Prompt{{Kind: &inferencev1.Prompt_Text{Text: "a"}}}}
	go func() { answers <- s.Complete(call, pieces{ctx: t.Context(), begun: begun}) }()
	<-begun
	ended := end()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for deadline := time.Now().Add(time.Minute); ; {
		err := s.Complete(call, pieces{ctx: cancelled})
		if errors.Is(err, gateway.ErrNoWorker) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the ending gateway accepted a call: %v", err)
		}
	}
	select {
	case err := <-ended:
		t.Fatalf("the gateway ended during a call: %v", err)
	case err := <-answers:
		t.Fatalf("the call ended: %v", err)
	default:
	}
	close(worker.resume)
	if err := <-answers; err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
