package gateway_test

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/apikey/apikeytest"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// fakeWorker samples what script returns over real gRPC.
type fakeWorker struct {
	inferencev1.UnimplementedInferenceWorkerServiceServer
	model        string
	broken       bool          // fails before the first token
	exits        bool          // closes its connection before the first token
	bug          bool          // fails with an internal error
	breaks       bool          // fails after the first token
	intruder     bool          // the scheduler has not launched it
	endless      bool          // samples until the caller disconnects
	aborted      chan struct{} // closed when the caller of an endless request has disconnected
	resume       chan struct{} // if set, it waits after the first token until this is closed
	reserved     bool          // for evaluations
	deregistered chan struct{} // if set, the registry does not list it once this is closed
	generate     sampler       // if set, it samples
	remembers    bool          // makes the segments of chats with their messages, as a real worker

	mu      sync.Mutex
	last    *inferencev1.GenerateRequest
	version uint64 // weights version; 0: 12
	slots   uint32
	asked   bool // set when the gateway has requested the status
	traceID string
}

// sampler replaces the completions of a fakeWorker.
type sampler func(*inferencev1.GenerateRequest, grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error

// load sets the weights version.
func (f *fakeWorker) load(version uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version = version
}

func (f *fakeWorker) trace() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.traceID
}

func (f *fakeWorker) GetInferenceStatus(context.Context, *inferencev1.GetInferenceStatusRequest) (*inferencev1.GetInferenceStatusResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = true
	return &inferencev1.GetInferenceStatusResponse{
		Model: f.model, MaxModelLen: 64, Receipt: &weightsv1.WeightsReceipt{Version: cmp.Or(f.version, 12), Digest: "blake3-aa"}, Slots: f.slots,
	}, nil
}

func (f *fakeWorker) Generate(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
	f.mu.Lock()
	f.last = req
	f.traceID = trace.SpanContextFromContext(stream.Context()).TraceID().String()
	f.mu.Unlock()
	if f.generate != nil {
		return f.generate(req, stream)
	}
	if f.broken {
		return status.Error(codes.Unavailable, "the engine is gone")
	}
	if f.remembers && req.GetSession().GetKnown() > 0 {
		return rpcerr.New(codes.FailedPrecondition, "SESSION_SEGMENTS_MISSING", "the worker has no segments")
	}
	if f.exits {
		return status.Error(codes.Canceled, "grpc: the client connection is closing")
	}
	if f.bug {
		return rpcerr.New(codes.Internal, "ENGINE_FAILED", "a tensor of the wrong shape")
	}
	if ids := req.GetPrompts()[0].GetTokens().GetIds(); slices.Contains(ids, 9999) {
		return rpcerr.New(codes.InvalidArgument, "INVALID_PROMPT", "token id 9999 is outside the vocabulary")
	}
	if len(req.GetParams().GetLogitBias()) > 1 {
		return rpcerr.New(codes.InvalidArgument, "UNSUPPORTED_BY_ENGINE", "engine fake does not support params.logit_bias").
			Field("params.logit_bias", "is not supported by engine fake").Fix("leave it out")
	}
	if req.GetParams().GetMaxTokens() > 64 {
		return rpcerr.New(codes.InvalidArgument, "CONTEXT_OVERFLOW", "3 tokens of prompt and %d new ones are more than the context of 64", req.GetParams().GetMaxTokens())
	}
	said := script(req)
	for p := range req.GetPrompts() {
		for n := range req.GetN() {
			for i := range said {
				if i < continued(req, uint32(p), n) {
					continue
				}
				piece := said[i].piece(req, i)
				piece.Prompt, piece.Sample = uint32(p), n
				if i == len(said)-1 {
					last(req, p, piece)
					if f.remembers {
						piece.Segments = remembered(req, said)
					}
				}
				if f.breaks && i == 1 {
					return status.Error(codes.Unavailable, "the engine is gone")
				}
				if f.endless && i == 1 {
					<-stream.Context().Done()
					close(f.aborted)
					return stream.Context().Err()
				}
				if f.resume != nil && i == 1 {
					select {
					case <-f.resume:
					case <-stream.Context().Done():
						return stream.Context().Err()
					}
				}
				if err := stream.Send(piece); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// continued is the number of tokens that earlier workers sampled.
func continued(req *inferencev1.GenerateRequest, prompt, sample uint32) int {
	for _, c := range req.GetContinuations() {
		if c.GetPrompt() == prompt && c.GetSample() == sample {
			return len(c.GetTokenIds())
		}
	}
	return 0
}

// Tokenize gives each byte of a text the id of its value after the special token 1, and chats the
// ids of promptOf.
func (f *fakeWorker) Tokenize(_ context.Context, req *inferencev1.TokenizeRequest) (*inferencev1.TokenizeResponse, error) {
	resp := &inferencev1.TokenizeResponse{MaxModelLen: 64}
	for _, p := range req.GetPrompts() {
		ids := promptOf(p)
		if p.GetText() != "" {
			ids = nil
			if !p.GetNoSpecialTokens() {
				ids = append(ids, 1)
			}
			for _, c := range []byte(p.GetText()) {
				ids = append(ids, uint32(c))
			}
		}
		resp.Prompts = append(resp.Prompts, &inferencev1.TokenIds{Ids: ids})
	}
	return resp, nil
}

// Detokenize is the inverse of Tokenize.
func (f *fakeWorker) Detokenize(_ context.Context, req *inferencev1.DetokenizeRequest) (*inferencev1.DetokenizeResponse, error) {
	resp := &inferencev1.DetokenizeResponse{}
	for _, p := range req.GetPrompts() {
		var text strings.Builder
		for _, id := range p.GetIds() {
			if id > 255 {
				return nil, rpcerr.New(codes.InvalidArgument, "INVALID_PROMPT", "token id %d is outside the vocabulary", id)
			}
			text.WriteByte(byte(id))
		}
		resp.Texts = append(resp.Texts, text.String())
	}
	return resp, nil
}

// token is one token that a fake worker samples, and what it adds to the parsed message.
type token struct {
	text  string
	delta *inferencev1.MessageDelta
}

// script returns the tokens of each completion: "one two three", at most max_tokens and until a
// stop string; of a chat with tools whose last message is the user's a thought and a call of the
// first tool.
func script(req *inferencev1.GenerateRequest) []token {
	var said []token
	for _, word := range []string{"one", " two", " three"} {
		if slices.Contains(req.GetParams().GetStop(), word) {
			break
		}
		said = append(said, token{text: word, delta: &inferencev1.MessageDelta{Content: word}})
	}
	chat := req.GetPrompts()[0].GetChat()
	if messages := chat.GetMessages(); len(chat.GetTools()) > 0 && chat.GetToolChoice().GetMode() != inferencev1.ToolChoice_MODE_NONE && messages[len(messages)-1].GetRole() == "user" {
		call := func(delta *inferencev1.ToolCallDelta) *inferencev1.MessageDelta {
			return &inferencev1.MessageDelta{ToolCalls: []*inferencev1.ToolCallDelta{delta}}
		}
		said = []token{
			{text: "<think>hm</think>", delta: &inferencev1.MessageDelta{Reasoning: "hm"}},
			{text: "<call>", delta: call(&inferencev1.ToolCallDelta{Id: "call_1", Name: chat.GetTools()[0].GetName()})},
			{text: `{"q":`, delta: call(&inferencev1.ToolCallDelta{Arguments: `{"q":`})},
			{text: `1}`, delta: call(&inferencev1.ToolCallDelta{Arguments: `1}`})},
		}
	}
	if most := req.GetParams().MaxTokens; most != nil {
		said = said[:min(len(said), int(*most))]
	}
	if len(said) == 0 {
		return []token{{}} // the last piece has no token
	}
	return said
}

// piece returns the piece of a completion with token i.
func (s token) piece(req *inferencev1.GenerateRequest, i int) *inferencev1.GenerateResponse {
	piece := &inferencev1.GenerateResponse{}
	if req.GetParse() {
		piece.Delta = s.delta
	}
	if s.text == "" {
		return piece
	}
	piece.Text, piece.TokenIds, piece.Logprobs, piece.RawLogprobs = s.text, []uint32{uint32(10 + i)}, []float32{-0.5}, []float32{-0.25}
	if i < 2 {
		piece.WeightsVersion = proto.Uint64(uint64(11 + i))
	}
	if req.GetTokenBytes() {
		piece.TokenBytes = [][]byte{[]byte(s.text)}
	}
	if k := req.GetParams().GetTopLogprobs(); k > 0 {
		piece.TopLogprobs = []*inferencev1.TopLogprobs{alternatives(k)}
	}
	return piece
}

// alternatives returns k tokens; the second one is a part of a character.
func alternatives(k uint32) *inferencev1.TopLogprobs {
	top := &inferencev1.TopLogprobs{}
	for i := range min(k, 2) {
		top.TokenIds, top.Logprobs = append(top.TokenIds, 20+i), append(top.Logprobs, -0.125*float32(i+1))
		top.TokenBytes = append(top.TokenBytes, [][]byte{[]byte("uno"), {0xe2, 0x80}}[i])
	}
	return top
}

// last adds what the last piece of a completion has.
func last(req *inferencev1.GenerateRequest, p int, piece *inferencev1.GenerateResponse) {
	piece.FinishReason, piece.PromptTokens, piece.PromptTokenIds = "stop", 2, []uint32{1, 2}
	if req.GetParams().MaxTokens != nil && req.GetParams().GetMaxTokens() == 0 {
		piece.FinishReason = "length"
	}
	for _, stop := range req.GetParams().GetStop() {
		if stop == " three" {
			piece.StopString = stop
		}
	}
	if req.GetPromptLogprobs() {
		piece.PromptTokenIds = promptOf(req.GetPrompts()[p])
		for at, id := range piece.PromptTokenIds {
			piece.PromptTexts = append(piece.PromptTexts, fmt.Sprintf("t%d", id))
			piece.PromptLogprobs = append(piece.PromptLogprobs, -float32(at)/2)
			if k := req.GetPromptTopLogprobs(); k > 0 {
				piece.PromptTopLogprobs = append(piece.PromptTopLogprobs, alternatives(k))
			}
		}
	}
	piece.VersionSpans = []*trajectoryv1.VersionSpan{{Version: 11, End: 1}, {Version: 12, Start: 1, End: 3}}
}

// promptOf returns the token ids of a prompt; of a text 1 and 2.
func promptOf(p *inferencev1.Prompt) []uint32 {
	if ids := p.GetTokens().GetIds(); ids != nil {
		return ids
	}
	return []uint32{1, 2}
}

// launcher is a scheduler that has launched the workers with the right proof.
type launcher struct{}

const rightProof = "right"

func (launcher) VerifyWorkers(_ context.Context, in *runv1.VerifyWorkersRequest, _ ...grpc.CallOption) (*runv1.VerifyWorkersResponse, error) {
	resp := &runv1.VerifyWorkersResponse{}
	for _, w := range in.GetWorkers() {
		resp.Accepted = append(resp.Accepted, w.GetProof() == rightProof)
	}
	return resp, nil
}

// proofOf is the proof of a registration.
func proofOf(w *fakeWorker) string {
	if w.intruder {
		return "copied"
	}
	return rightProof
}

// registry lists workers; the first of them until gone is closed.
type registry struct {
	list []discovery.Instance
	gone chan struct{}
}

func (r *registry) Watch(ctx context.Context, _ string) <-chan []discovery.Instance {
	out := make(chan []discovery.Instance, 2)
	out <- r.list
	go func() {
		defer close(out)
		select {
		case <-r.gone:
			out <- r.list[1:]
			<-ctx.Done()
		case <-ctx.Done():
		}
	}()
	return out
}

// ledger is a store in memory.
type ledger struct {
	gateway.Store // the methods for agents and keys are not used

	mu       sync.Mutex
	sessions map[string]*gateway.Session
	stored   sync.Map       // responses by id
	expired  chan time.Time // receives the time of each Expire
	log      lockedLog
	meters   metric.MeterProvider // of the gateway; nil: the global one
}

func (l *ledger) Expire(_ context.Context, before time.Time) (int, error) {
	select {
	case l.expired <- before:
	default: // another gateway
	}
	return 0, nil
}

func (l *ledger) ExpireKeys(context.Context, time.Time) (int, error) { return 0, nil }

func (l *ledger) KeepResponse(_ context.Context, r *gateway.Response) error {
	l.stored.Store(r.ID, r)
	return nil
}

func (l *ledger) Response(_ context.Context, id string) (*gateway.Response, error) {
	if found, ok := l.stored.Load(id); ok {
		return found.(*gateway.Response), nil
	}
	return nil, gateway.ErrResponse
}

func (l *ledger) DeleteResponse(_ context.Context, id string) error {
	if _, ok := l.stored.LoadAndDelete(id); !ok {
		return gateway.ErrResponse
	}
	return nil
}

// lockedLog is the log of a gateway.
type lockedLog struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lockedLog) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(line)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *ledger) Append(_ context.Context, session, run string, segments []*gateway.Segment) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.sessions[session]
	if s == nil {
		s = &gateway.Session{RunId: run}
		l.sessions[session] = s
	}
	first := len(s.GetSegments())
	for _, segment := range segments {
		for _, known := range s.GetSegments() {
			if known.GetSegment().GetSegmentId() == segment.GetSegment().GetSegmentId() && !proto.Equal(known.GetSegment(), segment.GetSegment()) {
				s.Segments = s.Segments[:first]
				return 0, gateway.ErrSegmentConflict
			}
		}
		s.Segments = append(s.Segments, proto.CloneOf(segment))
	}
	return first, nil
}

func (l *ledger) Session(_ context.Context, session string, from int) (*gateway.Session, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s, ok := l.sessions[session]; ok {
		return &gateway.Session{RunId: s.GetRunId(), Segments: slices.Clone(s.GetSegments()[min(from, len(s.GetSegments())):])}, nil
	}
	return nil, gateway.ErrSession
}

// serve runs a gateway for workers. It returns when the gateway lists all of their models.
func serve(t *testing.T, cfg gateway.Config, workers ...*fakeWorker) (*gateway.Server, *ledger) {
	t.Helper()
	s, store, _ := run(t, cfg, workers...)
	return s, store
}

// run is serve with a function that ends the gateway and returns the channel of its error.
func run(t *testing.T, cfg gateway.Config, workers ...*fakeWorker) (s *gateway.Server, store *ledger, end func() <-chan error) {
	t.Helper()
	return runOn(t, cfg, &ledger{sessions: map[string]*gateway.Session{}, expired: make(chan time.Time, 1)}, workers...)
}

// runOn is run with a store, which other gateways may share.
func runOn(t *testing.T, cfg gateway.Config, store *ledger, workers ...*fakeWorker) (s *gateway.Server, _ *ledger, end func() <-chan error) {
	t.Helper()
	return runWith(t, cfg, store, func(*gateway.Deps) {}, workers...)
}

// runWith is runOn with other dependencies.
func runWith(t *testing.T, cfg gateway.Config, store *ledger, edit func(*gateway.Deps), workers ...*fakeWorker) (s *gateway.Server, _ *ledger, end func() <-chan error) {
	t.Helper()
	reg := &registry{}
	for i, w := range workers {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer(grpc.StatsHandler(otelgrpc.NewServerHandler(otelgrpc.WithPropagators(propagation.TraceContext{}))), grpc.UnaryInterceptor(rpcerr.Unary(slog.New(slog.DiscardHandler))), grpc.StreamInterceptor(rpcerr.Stream(slog.New(slog.DiscardHandler))))
		inferencev1.RegisterInferenceWorkerServiceServer(server, w)
		go func() { _ = server.Serve(listener) }()
		t.Cleanup(server.Stop)
		if w.deregistered != nil {
			reg.gone = w.deregistered
		}
		reg.list = append(reg.list, discovery.Instance{
			Address: listener.Addr().String(),
			Meta: map[string]string{
				"run": "run-" + w.model, "incarnation": "1", "process": fmt.Sprint(i), "worker": fmt.Sprint("inference-", i), "rank": "0",
				"proof": proofOf(w), "reserved": strconv.FormatBool(w.reserved),
			},
		})
	}
	cfg.QueueTimeout = cmp.Or(cfg.QueueTimeout, 300*time.Millisecond)
	deps := gateway.Deps{
		Store: store, Registry: reg, Scheduler: launcher{}, Meters: store.meters, Log: slog.New(slog.NewTextHandler(&store.log, nil)), Now: func() time.Time { return time.Unix(1_700_000_000, 0) },
		Dial: func(_ string, _ uint32, address string) (gateway.Conn, error) {
			return grpc.NewClient(address, grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithPropagators(propagation.TraceContext{}))), grpc.WithTransportCredentials(insecure.NewCredentials()))
		},
	}
	edit(&deps)
	s, err := gateway.New(cfg, deps)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- s.Run(ctx)
		close(ended)
	}()
	end = func() <-chan error {
		cancel()
		return ended
	}
	t.Cleanup(func() {
		if err := <-end(); err != nil {
			t.Error(err)
		}
	})
	workers = slices.DeleteFunc(slices.Clone(workers), func(w *fakeWorker) bool { return w.intruder })
	versions := map[string]map[uint64]bool{} // of the workers of each model
	for _, w := range workers {
		if versions[w.model] == nil {
			versions[w.model] = map[uint64]bool{}
		}
		versions[w.model][cmp.Or(w.version, 12)] = true
	}
	for deadline := time.Now().Add(time.Minute); ; {
		got, err := s.ListModels(t.Context(), &gatewayv1.ListModelsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		unknown := slices.ContainsFunc(workers, func(w *fakeWorker) bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return !w.asked
		})
		// The gateway routes to a worker only after it has read its answer.
		unread := slices.ContainsFunc(got.GetModels(), func(m *gatewayv1.Model) bool {
			return len(m.GetWeightsVersions()) < len(versions[m.GetName()])
		})
		if !unknown && !unread && len(got.GetModels()) == len(versions) {
			return s, store, end
		}
		if time.Now().After(deadline) {
			t.Fatalf("the gateway lists %s", got)
		}
	}
}

// keyring returns a key and a ring that accepts it.
func keyring(t *testing.T, scope apikey.Scope) (ring *apikey.Ring, key string) {
	t.Helper()
	keys := apikeytest.New(t)
	return keys.Ring, keys.Create(t, &apikey.Record{Name: "ada", Scope: string(scope)}, time.Now())
}
