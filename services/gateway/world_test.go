package gateway_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// fakeWorker answers "one two three", a word a token, or as much of it as max_tokens takes, over real gRPC.
type fakeWorker struct {
	inferencev1.UnimplementedInferenceWorkerServiceServer
	model   string
	broken  bool          // fails before the first token
	leaves  bool          // its connection is closed before the first token
	bug     bool          // fails in a way that nobody has foreseen
	breaks  bool          // fails after the first token
	endless bool          // samples until the caller leaves
	left    chan struct{} // closed when an endless request's caller left
	hold    chan struct{} // not nil: after the first token it waits until this is closed
	gone    chan struct{} // not nil: once this is closed the registry does not have it, though it answers

	mu      sync.Mutex
	last    *inferencev1.GenerateRequest
	traceID string
}

func (f *fakeWorker) trace() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.traceID
}

func (f *fakeWorker) GetInferenceStatus(context.Context, *inferencev1.GetInferenceStatusRequest) (*inferencev1.GetInferenceStatusResponse, error) {
	return &inferencev1.GetInferenceStatusResponse{
		Model: f.model, MaxModelLen: 64, Receipt: &weightsv1.WeightsReceipt{Version: 12, Digest: "blake3-aa"},
	}, nil
}

func (f *fakeWorker) Generate(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
	f.mu.Lock()
	f.last = req
	f.traceID = trace.SpanContextFromContext(stream.Context()).TraceID().String()
	f.mu.Unlock()
	if f.broken {
		return status.Error(codes.Unavailable, "the engine is gone")
	}
	if f.leaves {
		return status.Error(codes.Canceled, "grpc: the client connection is closing")
	}
	if f.bug {
		return rpcerr.New(codes.Internal, "ENGINE_FAILED", "a tensor of the wrong shape")
	}
	if ids := req.GetPrompts()[0].GetTokens().GetIds(); slices.Contains(ids, 9999) {
		return rpcerr.New(codes.InvalidArgument, "INVALID_PROMPT", "token id 9999 is outside the vocabulary")
	}
	if req.GetParams().GetMaxTokens() > 64 {
		return rpcerr.New(codes.InvalidArgument, "CONTEXT_OVERFLOW", "3 tokens of prompt and %d new ones are more than the context of 64", req.GetParams().GetMaxTokens())
	}
	words := []string{"one", " two", " three"}
	if most := req.GetParams().MaxTokens; most != nil {
		words = words[:min(len(words), int(*most))]
	}
	for p := range req.GetPrompts() {
		for n := range req.GetN() {
			for i, word := range words {
				piece := &inferencev1.GenerateResponse{
					Prompt: uint32(p), Sample: n, Text: word, TokenIds: []uint32{uint32(10 + i)}, Logprobs: []float32{-0.5}, RawLogprobs: []float32{-0.25},
				}
				if i < 2 {
					piece.WeightsVersion = proto.Uint64(uint64(11 + i))
				}
				if i == len(words)-1 {
					piece.FinishReason, piece.PromptTokens, piece.PromptTokenIds = "stop", 2, []uint32{1, 2}
					if req.GetPromptLogprobs() {
						piece.PromptTokenIds = promptOf(req.GetPrompts()[p])
						for at, id := range piece.PromptTokenIds {
							piece.PromptTexts = append(piece.PromptTexts, fmt.Sprintf("t%d", id))
							piece.PromptLogprobs = append(piece.PromptLogprobs, -float32(at)/2)
						}
					}
					piece.VersionSpans = []*trajectoryv1.VersionSpan{{Version: 11, End: 1}, {Version: 12, Start: 1, End: 3}}
				}
				if f.breaks && i == 1 {
					return status.Error(codes.Unavailable, "the engine is gone")
				}
				if f.endless && i == 1 {
					<-stream.Context().Done()
					close(f.left)
					return stream.Context().Err()
				}
				if f.hold != nil && i == 1 {
					select {
					case <-f.hold:
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

// promptOf is the ids that were sent; of a text 1 and 2.
func promptOf(p *inferencev1.Prompt) []uint32 {
	if ids := p.GetTokens().GetIds(); ids != nil {
		return ids
	}
	return []uint32{1, 2}
}

// registry announces workers: the first of them until gone is closed, the others for ever.
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
	mu       sync.Mutex
	sessions map[string][]*gateway.Turn
	forgot   chan time.Time // sessions before this
	log      lockedLog
}

func (l *ledger) Forget(_ context.Context, before time.Time) (int, error) {
	l.forgot <- before
	return 0, nil
}

// lockedLog is what a gateway has logged.
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

func (l *ledger) Append(_ context.Context, session string, turns []*gateway.Turn) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sessions[session] = append(l.sessions[session], turns...)
	return nil
}

func (l *ledger) Turns(_ context.Context, session string) ([]*gateway.Turn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if turns, ok := l.sessions[session]; ok {
		return turns, nil
	}
	return nil, gateway.ErrSession
}

// serve runs a gateway before workers; it returns when the gateway lists all their models.
func serve(t *testing.T, cfg gateway.Config, workers ...*fakeWorker) (*gateway.Server, *ledger) {
	t.Helper()
	s, store, _ := run(t, cfg, workers...)
	return s, store
}

// run is serve, with what ends the gateway and gives its last word.
func run(t *testing.T, cfg gateway.Config, workers ...*fakeWorker) (s *gateway.Server, store *ledger, end func() <-chan error) {
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
		if w.gone != nil {
			reg.gone = w.gone
		}
		reg.list = append(reg.list, discovery.Instance{
			Address: listener.Addr().String(),
			Meta:    map[string]string{"run": "run-" + w.model, "incarnation": "1", "process": fmt.Sprint(i)},
		})
	}
	store = &ledger{sessions: map[string][]*gateway.Turn{}, forgot: make(chan time.Time, 1)}
	s, err := gateway.New(cfg, gateway.Deps{
		Store: store, Registry: reg, Log: slog.New(slog.NewTextHandler(&store.log, nil)), Now: func() time.Time { return time.Unix(1_700_000_000, 0) },
		Dial: func(address string) (gateway.Conn, error) {
			return grpc.NewClient(address, grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithPropagators(propagation.TraceContext{}))), grpc.WithTransportCredentials(insecure.NewCredentials()))
		},
	})
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
	models := map[string]bool{}
	for _, w := range workers {
		models[w.model] = true
	}
	for deadline := time.Now().Add(time.Minute); ; {
		got, err := s.ListModels(t.Context(), &gatewayv1.ListModelsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if len(got.GetModels()) == len(models) {
			return s, store, end
		}
		if time.Now().After(deadline) {
			t.Fatalf("the gateway lists %s", got)
		}
	}
}

// keyring is a key, and a ring that knows it.
func keyring(t *testing.T, scope apikey.Scope) (ring *apikey.Ring, key string) {
	t.Helper()
	keep := apikey.Keep{Path: filepath.Join(t.TempDir(), "api-keys.json")}
	key, err := keep.Create("ada", scope, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return apikey.Open(keep.Path), key
}
