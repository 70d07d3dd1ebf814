package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

// strict is a backend that fails the test for a request that the contract does not allow, and
// samples what is hard to write: reasoning, text, two calls, parts of characters.
type strict struct{ t *testing.T }

func (s strict) valid(m proto.Message) {
	if err := protovalidate.Validate(m); err != nil {
		s.t.Errorf("the edge sent %v: %v", m, err)
	}
}

func (strict) Models(context.Context) []*gatewayv1.Model {
	return []*gatewayv1.Model{{Name: "tiny", RunId: "run-tiny"}}
}

func (s strict) Complete(_ context.Context, req *gatewayv1.CompleteRequest, send func(*gatewayv1.CompleteResponse) error) error {
	s.valid(req)
	if req.GetModel() != "" && req.GetModel() != "tiny" {
		return ErrUnknownModel
	}
	if max := req.GetParams().GetMaxTokens(); max > 64 {
		return rpcerr.New(codes.InvalidArgument, "CONTEXT_OVERFLOW", "too long")
	}
	for p := range min(len(req.GetPrompts()), 3) {
		for n := range min(req.GetN(), 3) {
			for _, piece := range sampled(req) {
				piece.Prompt, piece.Sample = uint32(p), n
				if err := send(&gatewayv1.CompleteResponse{SessionId: "sess-1", Model: "tiny", Piece: piece}); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// sampled returns the pieces of a completion.
func sampled(req *gatewayv1.CompleteRequest) []*inferencev1.GenerateResponse {
	top := &inferencev1.TopLogprobs{TokenIds: []uint32{1, 2}, Logprobs: []float32{-0.1, -9}, TokenBytes: [][]byte{{0xe2}, []byte("<b>")}}
	pieces := []*inferencev1.GenerateResponse{
		{Delta: &inferencev1.MessageDelta{}},
		{Text: "<think>", Delta: &inferencev1.MessageDelta{Reasoning: "a\u2028"}},
		{Text: "é\x00", Delta: &inferencev1.MessageDelta{Content: "é\x00"}},
		{Text: "x", Delta: &inferencev1.MessageDelta{ToolCalls: []*inferencev1.ToolCallDelta{{Id: "a", Name: "f"}, {Index: 1, Id: "b", Name: "g", Arguments: "no JSON"}}}},
		{Text: "y", Delta: &inferencev1.MessageDelta{ToolCalls: []*inferencev1.ToolCallDelta{{Index: 1, Arguments: "}"}}, Content: "after"}},
	}
	for i, piece := range pieces {
		if i > 0 && req.GetParams().GetMaxTokens() > 0 || req.GetParams().MaxTokens == nil {
			piece.TokenIds, piece.Logprobs = []uint32{uint32(i), 7}, []float32{-1, -2}
			piece.TokenBytes, piece.TopLogprobs = [][]byte{{0xc3}, {0xa9}}, []*inferencev1.TopLogprobs{top, top}
		}
		if !req.GetParse() {
			piece.Delta = nil
		}
	}
	last := pieces[len(pieces)-1]
	last.FinishReason, last.PromptTokens, last.PromptTokenIds, last.StopString = "stop", 2, []uint32{1, 2}, "z"
	last.VersionSpans, last.CachedTokens = []*trajectoryv1.VersionSpan{{Version: 3, End: 8}}, 1
	if req.GetPromptLogprobs() {
		last.PromptLogprobs, last.PromptTexts, last.PromptTopLogprobs = []float32{0, -1}, []string{"a", "b"}, []*inferencev1.TopLogprobs{top, top}
	}
	return pieces
}

func (strict) KeepResponse(_ context.Context, r *Response) error {
	if !json.Valid(r.Body) || !json.Valid(r.Input) {
		return fmt.Errorf("the response %s or its input %s is not JSON", r.Body, r.Input)
	}
	return nil
}

func (strict) Response(context.Context, string) (*Response, error) { return nil, ErrResponse }

func (strict) DeleteResponse(context.Context, string) error { return ErrResponse }

func (strict) Messages(context.Context, string, string) ([]string, error) { return nil, ErrSession }

func (s strict) Tokenize(_ context.Context, model string, req *inferencev1.TokenizeRequest) (*inferencev1.TokenizeResponse, error) {
	s.valid(req)
	if model != "" && model != "tiny" {
		return nil, ErrUnknownModel
	}
	return &inferencev1.TokenizeResponse{Prompts: []*inferencev1.TokenIds{{Ids: make([]uint32, 1500)}}, MaxModelLen: 64}, nil
}

func (s strict) Detokenize(_ context.Context, _ string, req *inferencev1.DetokenizeRequest) (*inferencev1.DetokenizeResponse, error) {
	s.valid(req)
	return &inferencev1.DetokenizeResponse{Texts: make([]string, len(req.GetPrompts()))}, nil
}

func (s strict) NextPrompts(_ context.Context, req *gatewayv1.NextPromptsRequest) (*gatewayv1.NextPromptsResponse, error) {
	s.valid(req)
	return &gatewayv1.NextPromptsResponse{RunId: "run-tiny", Sessions: []*Task{{SessionId: "sess-1", RowJson: []byte(`{"prompt":"a"}`), PromptJson: []byte(`"a"`)}}}, nil
}

func (s strict) CloseSession(_ context.Context, req *gatewayv1.CloseSessionRequest) (*gatewayv1.CloseSessionResponse, error) {
	s.valid(req)
	return &gatewayv1.CloseSessionResponse{End: &End{Reward: req.GetReward(), Metrics: req.GetMetrics()}}, nil
}

func TestIdsHaveNoControlCharacters(t *testing.T) {
	t.Parallel()
	prompts := []*inferencev1.Prompt{{Kind: &inferencev1.Prompt_Text{Text: "a"}}}
	for id, valid := range map[string]bool{"": true, "req-1 é": true, "req-\x00": false, "req\n1": false, "\x7f": false} {
		for _, req := range []*gatewayv1.CompleteRequest{{RequestId: id, Prompts: prompts}, {SessionId: id, Prompts: prompts}} {
			if err := protovalidate.Validate(req); (err == nil) != valid {
				t.Errorf("%q: %v", id, err)
			}
		}
	}
}

// FuzzDialects sends bodies to every endpoint of every dialect. No body is an internal error or a
// panic, no request that reaches the backend violates the contract, and every response is JSON or
// events of JSON. The corpus is the golden tables and testdata/fuzz.
func FuzzDialects(f *testing.F) {
	golden, err := filepath.Glob(filepath.Join("testdata", "*.golden"))
	if err != nil || len(golden) == 0 {
		f.Fatalf("%v, %v", golden, err)
	}
	for _, path := range golden {
		raw, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		for line := range strings.SplitSeq(string(raw), "\n") {
			if at := strings.SplitN(line, " ", 3); len(at) == 3 && at[0] == http.MethodPost {
				f.Add(at[1], []byte(at[2]))
			}
		}
	}
	f.Add("/v1/rollout/prompts", []byte(`{"model":"tiny","max_groups":2,"wait_seconds":0.5}`))
	f.Add("/v1/sessions/sess-1/close", []byte(`{"reward":0.5,"metrics":{"turns":1},"outcome":"truncated"}`))
	f.Add("/sessions/sess-1/close", []byte(`{"outcome":"INFRA_FAILED","reason":"TOOL_TIMEOUT"}`))
	f.Fuzz(func(t *testing.T, path string, body []byte) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.URL.Path = path
		front := &edge.Edge{Options: edge.Options{Backend: strict{t}, Responses: strict{t}, Log: slog.New(slog.DiscardHandler), Now: time.Now}}
		w := httptest.NewRecorder()
		handler(front, strict{t}).ServeHTTP(w, req)
		if w.Code >= http.StatusInternalServerError {
			t.Errorf("%d %s", w.Code, w.Body)
		}
		if w.Header().Get("Content-Type") == "text/event-stream" {
			for event := range strings.SplitSeq(w.Body.String(), "\n") {
				data, ok := strings.CutPrefix(event, "data: ")
				if ok && data != "[DONE]" && !json.Valid([]byte(data)) {
					t.Errorf("event %q", data)
				}
			}
			return
		}
		var failure struct {
			Error struct{ Message, Reason string }
		}
		if slices.Contains([]int{http.StatusMovedPermanently, http.StatusPermanentRedirect, http.StatusTemporaryRedirect}, w.Code) {
			return // of a path that is not clean
		}
		if err := json.Unmarshal(w.Body.Bytes(), &failure); w.Code != http.StatusOK && (err != nil || failure.Error.Message == "" || failure.Error.Reason == "") {
			t.Errorf("%d %s: %v", w.Code, w.Body, err)
		} else if !json.Valid(w.Body.Bytes()) {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	})
}
