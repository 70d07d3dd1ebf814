package gateway_test

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	sessionv1 "github.com/rollout-rl/rollout/proto/gen/rollout/session/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// tokenAt is the token that every worker samples at a position, which depends on the seed as in a
// real engine.
func tokenAt(seed uint64, prompt, sample uint32, at int) uint32 {
	return uint32(seed%97)*10_000 + prompt*1000 + sample*100 + uint32(at)
}

const sampledTokens = 12

// sampling samples tokens with a version. stop is called before each token; it returns an error to
// fail with.
func sampling(version uint64, stop func(req *inferencev1.GenerateRequest, at int) error) sampler {
	return func(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
		ended := func(prompt, sample uint32) bool {
			return slices.ContainsFunc(req.GetContinuations(), func(c *inferencev1.Continuation) bool {
				return c.GetEnded() && c.GetPrompt() == prompt && c.GetSample() == sample
			})
		}
		for p := range uint32(len(req.GetPrompts())) {
			for n := range req.GetN() {
				if ended(p, n) {
					continue
				}
				start := continued(req, p, n)
				for at := start; at < sampledTokens; at++ {
					if err := stop(req, at); err != nil {
						return err
					}
					piece := &inferencev1.GenerateResponse{
						Prompt: p, Sample: n, Text: fmt.Sprint(at, " "), TokenIds: []uint32{tokenAt(req.GetParams().GetSeed(), p, n, at)},
						Logprobs: []float32{-float32(at)}, RawLogprobs: []float32{-float32(at) / 2}, WeightsVersion: proto.Uint64(version),
					}
					if at == sampledTokens-1 {
						piece.FinishReason, piece.PromptTokens, piece.PromptTokenIds = "length", 2, []uint32{1, 2}
						piece.VersionSpans = []*trajectoryv1.VersionSpan{{Version: version, End: uint32(sampledTokens - start)}}
					}
					if err := stream.Send(piece); err != nil {
						return err
					}
				}
			}
		}
		return nil
	}
}

// completion joins the pieces of a completion.
func (c *collected) completion(prompt, sample uint32) (ids []uint32, text string, logprobs []float32, last *inferencev1.GenerateResponse) {
	for _, m := range c.pieces {
		p := m.GetPiece()
		if p.GetPrompt() != prompt || p.GetSample() != sample {
			continue
		}
		ids, text, logprobs = append(ids, p.GetTokenIds()...), text+p.GetText(), append(logprobs, p.GetLogprobs()...)
		if p.GetFinishReason() != "" {
			last = p
		}
	}
	return ids, text, logprobs, last
}

// segmentOf returns the segment of the session sess-1 that starts with a token.
func segmentOf(t *testing.T, store *ledger, first uint32) *sessionv1.Segment {
	t.Helper()
	session, err := store.Session(t.Context(), "sess-1", 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range session.GetSegments() {
		if ids := s.GetSegment().GetInline().GetTokenIds(); binary.LittleEndian.Uint32(ids) == first {
			return s.GetSegment()
		}
	}
	t.Fatalf("no segment starts with %d: %v", first, session)
	return nil
}

func textPrompts(texts ...string) []*inferencev1.Prompt {
	var prompts []*inferencev1.Prompt
	for _, text := range texts {
		prompts = append(prompts, &inferencev1.Prompt{Kind: &inferencev1.Prompt_Text{Text: text}})
	}
	return prompts
}

// whole fails the test unless a completion has all tokens once, in order.
func whole(t *testing.T, c *collected, seed uint64, prompt, sample uint32) *inferencev1.GenerateResponse {
	t.Helper()
	ids, text, logprobs, last := c.completion(prompt, sample)
	var want []uint32
	var words strings.Builder
	for at := range sampledTokens {
		want = append(want, tokenAt(seed, prompt, sample, at))
		fmt.Fprint(&words, at, " ")
	}
	if !slices.Equal(ids, want) || text != words.String() || len(logprobs) != len(ids) || last == nil {
		t.Fatalf("completion %d, %d: ids %v, want %v; text %q; last piece %v", prompt, sample, ids, want, text, last)
	}
	return last
}

// Each of several workers fails after some tokens. The caller gets one completion without a gap or
// a repetition.
func TestWorkersThatFailAreContinued(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seeds := map[uint64]bool{}
	failures := 0
	var workers []*fakeWorker
	for i := range 3 {
		workers = append(workers, &fakeWorker{model: "tiny", generate: sampling(uint64(11+i), func(req *inferencev1.GenerateRequest, at int) error {
			mu.Lock()
			defer mu.Unlock()
			seeds[req.GetParams().GetSeed()] = true
			if at%3 == 2 && failures < 7 && continued(req, 0, 0) != at {
				failures++
				return status.Error(codes.Unavailable, "the engine is gone")
			}
			return nil
		})})
	}
	s, store := serve(t, gateway.Config{QueueTimeout: 20 * time.Second}, workers...)
	stream := &collected{ctx: t.Context()}
	if err := s.Complete(&gatewayv1.CompleteRequest{Model: "tiny", N: 2, Stream: true, SessionId: "sess-1", Prompts: textPrompts("a", "b")}, stream); err != nil {
		t.Fatal(err)
	}
	if len(seeds) != 1 || failures != 7 {
		t.Fatalf("seeds %v, %d failures", seeds, failures)
	}
	for seed := range seeds {
		for p := range uint32(2) {
			for n := range uint32(2) {
				last := whole(t, stream, seed, p, n)
				turn := segmentOf(t, store, tokenAt(seed, p, n, 0))
				end := uint32(0)
				for _, span := range last.GetVersionSpans() {
					if span.GetStart() != end || span.GetEnd() <= end || span.GetVersion() < 11 || span.GetVersion() > 13 {
						t.Fatalf("spans %v", last.GetVersionSpans())
					}
					end = span.GetEnd()
				}
				if end != sampledTokens || turn.GetTokens() != sampledTokens || len(turn.GetInline().GetLogprobs()) != 4*sampledTokens || len(turn.GetVersionSpans()) != len(last.GetVersionSpans()) {
					t.Fatalf("spans %v, turn %v", last.GetVersionSpans(), turn)
				}
			}
		}
	}
}

// A worker that shuts down returns the finish reason abort. The caller does not see it.
func TestAbortedCompletionsAreContinued(t *testing.T) {
	t.Parallel()
	for _, streamed := range []bool{true, false} {
		aborts := 0
		worker := sampling(12, func(*inferencev1.GenerateRequest, int) error { return nil })
		s, _ := serve(t, gateway.Config{}, &fakeWorker{model: "tiny", generate: func(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
			if aborts++; aborts > 1 {
				return worker(req, stream)
			}
			seed := req.GetParams().GetSeed()
			return stream.Send(&inferencev1.GenerateResponse{
				TokenIds: []uint32{tokenAt(seed, 0, 0, 0), tokenAt(seed, 0, 0, 1)}, Text: "0 1 ", Logprobs: []float32{0, -1}, FinishReason: "abort",
				WeightsVersion: proto.Uint64(11), VersionSpans: []*trajectoryv1.VersionSpan{{Version: 11, End: 2}},
			})
		}})
		stream := &collected{ctx: t.Context()}
		seed := proto.Uint64(5)
		if err := s.Complete(&gatewayv1.CompleteRequest{Stream: streamed, Params: &inferencev1.SamplingParams{Seed: seed}, Prompts: textPrompts("a")}, stream); err != nil {
			t.Fatal(err)
		}
		last := whole(t, stream, *seed, 0, 0)
		if spans := last.GetVersionSpans(); streamed && (len(spans) != 2 || spans[1].GetStart() != 2) || !streamed && len(spans) != 1 {
			t.Errorf("spans %v", spans)
		}
	}
}

func TestInterruptedStreamEndsWithATypedError(t *testing.T) {
	t.Parallel()
	s, store := serve(t, gateway.Config{}, &fakeWorker{model: "tiny", generate: sampling(12, func(_ *inferencev1.GenerateRequest, at int) error {
		if at == 4 {
			return status.Error(codes.Unavailable, "the engine is gone")
		}
		return nil
	})})
	stream := &collected{ctx: t.Context()}
	err := s.Complete(&gatewayv1.CompleteRequest{Stream: true, Prompts: textPrompts("a")}, stream)
	e, _ := rpcerr.From(err)
	if rpcerr.Reason(err) != gateway.ReasonInterrupted || e.RetryDelay() == 0 || !strings.Contains(err.Error(), "after 4 tokens: the engine is gone") {
		t.Errorf("error %v", err)
	}
	if len(stream.pieces) != 4 || len(store.sessions) != 0 {
		t.Errorf("%d pieces, stored %v", len(stream.pieces), store.sessions)
	}
}

func TestRequestsHaveAllFieldsOfTheCaller(t *testing.T) {
	t.Parallel()
	worker := &fakeWorker{model: "tiny"}
	s, _ := serve(t, gateway.Config{}, worker)
	req := &gatewayv1.CompleteRequest{
		N: 2, Stream: true, PromptLogprobs: true, Parse: true, TokenBytes: true, PromptTopLogprobs: 3, WeightsVersion: proto.Uint64(12),
		Params: &inferencev1.SamplingParams{TopLogprobs: 4}, Prompts: textPrompts("a"),
	}
	if err := s.Complete(req, &collected{ctx: t.Context()}); err != nil {
		t.Fatal(err)
	}
	got := proto.CloneOf(worker.last)
	if got.GetRequestId() == "" || got.GetParams().Seed == nil {
		t.Errorf("request %v", got)
	}
	got.RequestId, got.Params.Seed = "", nil
	want := &inferencev1.GenerateRequest{
		Prompts: req.GetPrompts(), Params: &inferencev1.SamplingParams{TopLogprobs: 4}, N: 2, Stream: true, PromptLogprobs: true, Parse: true,
		TokenBytes: true, PromptTopLogprobs: 3, WeightsVersion: proto.Uint64(12),
	}
	if !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// A worker that has not ended the request of a lost connection gets it again, with the same id.
func TestRequestsKeepTheirIDs(t *testing.T) {
	t.Parallel()
	var ids []string
	worker := sampling(12, func(_ *inferencev1.GenerateRequest, at int) error {
		switch {
		case at == 3 && len(ids) == 1:
			return status.Error(codes.Unavailable, "the connection is lost")
		case at == 3 && len(ids) == 2:
			return rpcerr.New(codes.AlreadyExists, "DUPLICATE_REQUEST", "the request is still being answered")
		}
		return nil
	})
	s, _ := serve(t, gateway.Config{QueueTimeout: 10 * time.Second}, &fakeWorker{model: "tiny", generate: func(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
		ids = append(ids, req.GetRequestId())
		return worker(req, stream)
	}})
	seed, stream := uint64(5), &collected{ctx: t.Context()}
	if err := s.Complete(&gatewayv1.CompleteRequest{Stream: true, Params: &inferencev1.SamplingParams{Seed: &seed}, Prompts: textPrompts("a")}, stream); err != nil {
		t.Fatal(err)
	}
	whole(t, stream, seed, 0, 0)
	if len(ids) != 3 || ids[0] != ids[1] || ids[0] != ids[2] {
		t.Errorf("ids %v", ids)
	}
}
