package gateway_test

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// versioned is a worker that samples with its version, and refuses another pinned one.
func versioned(version uint64) *fakeWorker {
	w := &fakeWorker{model: "tiny", version: version}
	w.generate = func(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
		w.mu.Lock()
		current := w.version
		w.mu.Unlock()
		if req.WeightsVersion != nil && req.GetWeightsVersion() != current {
			return rpcerr.New(codes.FailedPrecondition, "WEIGHTS_NOT_FOUND", "the worker serves another version")
		}
		return sampling(current, func(*inferencev1.GenerateRequest, int) error { return nil })(req, stream)
	}
	return w
}

func versionOf(c *collected) uint64 {
	return c.pieces[len(c.pieces)-1].GetPiece().GetVersionSpans()[0].GetVersion()
}

func TestPinnedVersionSelectsTheWorker(t *testing.T) {
	t.Parallel()
	one, two := versioned(3), versioned(4)
	s, _ := serve(t, gateway.Config{}, one, two)
	for _, want := range []uint64{3, 4, 3, 4} {
		stream := &collected{ctx: t.Context()}
		if err := s.Complete(&gatewayv1.CompleteRequest{Stream: true, WeightsVersion: &want, Prompts: textPrompts("a")}, stream); err != nil || versionOf(stream) != want {
			t.Fatalf("version %d: %v", want, err)
		}
	}
	err := s.Complete(&gatewayv1.CompleteRequest{WeightsVersion: proto.Uint64(7), Prompts: textPrompts("a")}, &collected{ctx: t.Context()})
	e, _ := rpcerr.From(err)
	if rpcerr.Code(err) != codes.FailedPrecondition || rpcerr.Reason(err) != gateway.ReasonVersion || e.Metadata()["versions"] != "3,4" {
		t.Errorf("got %v", err)
	}
	resp, body := do(t, s, http.MethodPost, "/v1/completions", `{"model":"tiny","prompt":"a","weights_version":7}`, "")
	if resp.StatusCode != http.StatusConflict || !strings.Contains(body, `"reason":"WEIGHTS_NOT_FOUND"`) || !strings.Contains(body, `"versions":"3,4"`) {
		t.Errorf("%s %s", resp.Status, body)
	}
	// The workers have other versions now. The gateway has not seen that yet.
	one.load(5)
	two.load(6)
	for _, want := range []uint64{6, 5} {
		stream := &collected{ctx: t.Context()}
		if err := s.Complete(&gatewayv1.CompleteRequest{Stream: true, WeightsVersion: &want, Prompts: textPrompts("a")}, stream); err != nil || versionOf(stream) != want {
			t.Fatalf("version %d: %v", want, err)
		}
	}
}

func TestMinimumVersionIsWaitedFor(t *testing.T) {
	t.Parallel()
	worker := versioned(3)
	s, _ := serve(t, gateway.Config{QueueTimeout: 500 * time.Millisecond}, worker)
	req := &gatewayv1.CompleteRequest{Stream: true, MinWeightsVersion: proto.Uint64(5), Prompts: textPrompts("a")}
	err := s.Complete(req, &collected{ctx: t.Context()})
	if e, _ := rpcerr.From(err); rpcerr.Reason(err) != gateway.ReasonBehind || e.RetryDelay() == 0 || e.Metadata()["versions"] != "3" {
		t.Fatalf("got %v", err)
	}
	resp, body := do(t, s, http.MethodPost, "/v1/completions", `{"model":"tiny","prompt":"a","min_weights_version":5}`, "")
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") != "1" {
		t.Fatalf("%s %s", resp.Status, body)
	}
	stream := &collected{ctx: t.Context()}
	done := make(chan error, 1)
	go func() { done <- s.Complete(req, stream) }()
	worker.load(5)
	if err := <-done; err != nil || versionOf(stream) != 5 {
		t.Fatalf("got %v", err)
	}
}

// blocking is a worker with one slot whose completions wait for a value.
func blocking(next chan struct{}, running *atomic.Int32) *fakeWorker {
	return &fakeWorker{model: "tiny", slots: 1, generate: func(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
		running.Add(1)
		defer running.Add(-1)
		select {
		case <-next:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
		return sampling(12, func(*inferencev1.GenerateRequest, int) error { return nil })(req, stream)
	}}
}

// A worker has at most two completions per slot. Others wait, and time out with the time to retry.
func TestRequestsWaitWhileAllWorkersAreFull(t *testing.T) {
	t.Parallel()
	next, running := make(chan struct{}), atomic.Int32{}
	s, _ := serve(t, gateway.Config{QueueTimeout: time.Second}, blocking(next, &running))
	done := make(chan error, 5)
	for range 3 {
		go func() {
			done <- s.Complete(&gatewayv1.CompleteRequest{Prompts: textPrompts("a")}, &collected{ctx: t.Context()})
		}()
	}
	err := <-done
	if e, _ := rpcerr.From(err); rpcerr.Reason(err) != gateway.ReasonBusy || rpcerr.Code(err) != codes.Unavailable || e.RetryDelay() == 0 {
		t.Fatalf("got %v", err)
	}
	if n := running.Load(); n != 2 {
		t.Errorf("the worker has %d completions", n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		done <- s.Complete(&gatewayv1.CompleteRequest{Prompts: textPrompts("gone")}, &collected{ctx: ctx})
	}()
	go func() {
		done <- s.Complete(&gatewayv1.CompleteRequest{Prompts: textPrompts("late")}, &collected{ctx: t.Context()})
	}()
	cancel()
	if err := <-done; err == nil {
		t.Error("a caller that is gone got a completion")
	}
	close(next)
	for range 3 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// A worker that is reserved for evaluations gets only the requests for the version that it serves.
func TestAReservedWorkerServesItsVersionOnly(t *testing.T) {
	t.Parallel()
	current, reserved := versioned(9), versioned(5)
	reserved.reserved = true
	s, _ := serve(t, gateway.Config{}, current, reserved)
	complete := func(req *gatewayv1.CompleteRequest) (uint64, error) {
		stream := &collected{ctx: t.Context()}
		req.Stream, req.Prompts = true, textPrompts("a")
		if err := s.Complete(req, stream); err != nil {
			return 0, err
		}
		return versionOf(stream), nil
	}
	for range 20 {
		if got, err := complete(&gatewayv1.CompleteRequest{}); err != nil || got != 9 {
			t.Fatalf("a request for any version got %d, %v", got, err)
		}
		if got, err := complete(&gatewayv1.CompleteRequest{MinWeightsVersion: proto.Uint64(2)}); err != nil || got != 9 {
			t.Fatalf("a request for version 2 or later got %d, %v", got, err)
		}
		if got, err := complete(&gatewayv1.CompleteRequest{WeightsVersion: proto.Uint64(5)}); err != nil || got != 5 {
			t.Fatalf("a request for version 5 got %d, %v", got, err)
		}
	}
	resp, body := do(t, s, http.MethodPost, "/v1/completions", `{"model":"tiny","prompt":"a","weights_version":6}`, "")
	if resp.StatusCode != http.StatusConflict || !strings.Contains(body, `"versions":"5,9"`) {
		t.Errorf("%s %s", resp.Status, body)
	}
	resp, body = do(t, s, http.MethodGet, "/v1/models", "", "")
	if resp.StatusCode != http.StatusOK || !strings.Contains(body, `"weights_version":9`) {
		t.Errorf("%s %s", resp.Status, body)
	}
	reserved.load(6) // the next evaluation
	if got, err := complete(&gatewayv1.CompleteRequest{WeightsVersion: proto.Uint64(6)}); err != nil || got != 6 {
		t.Errorf("a request for version 6 got %d, %v", got, err)
	}
}
