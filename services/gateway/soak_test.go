package gateway_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

const soakTokens = 8

// unreliable is a worker that fails at random, and counts the completions that it samples.
func unreliable(slots uint32, running *atomic.Int32) *fakeWorker {
	return &fakeWorker{model: "tiny", slots: slots, generate: func(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
		running.Add(1)
		defer running.Add(-1)
		start := continued(req, 0, 0)
		last := func(piece *inferencev1.GenerateResponse) {
			piece.FinishReason, piece.PromptTokenIds = "length", promptOf(req.GetPrompts()[0])
			if start < soakTokens {
				piece.VersionSpans = []*trajectoryv1.VersionSpan{{Version: 3, End: uint32(soakTokens - start)}}
			}
		}
		if start == soakTokens { // the worker before failed after its last token
			piece := &inferencev1.GenerateResponse{}
			last(piece)
			return stream.Send(piece)
		}
		for at := start; at < soakTokens; at++ {
			select { // decoding takes time
			case <-time.After(time.Duration(rand.IntN(1000)) * time.Microsecond):
			case <-stream.Context().Done():
				return stream.Context().Err()
			}
			switch rand.IntN(150) {
			case 0:
				return status.Error(codes.Unavailable, "the engine is gone")
			case 1:
				return rpcerr.New(codes.ResourceExhausted, "ENGINE_FULL", "no memory for another completion")
			}
			piece := &inferencev1.GenerateResponse{
				TokenIds: []uint32{tokenAt(req.GetParams().GetSeed(), 0, 0, at)}, Logprobs: []float32{-1}, RawLogprobs: []float32{-1}, WeightsVersion: proto.Uint64(3),
			}
			switch {
			case rand.IntN(100) == 0:
				piece.FinishReason = "abort"
			case at == soakTokens-1:
				last(piece)
			}
			if err := stream.Send(piece); err != nil || piece.GetFinishReason() != "" {
				return err
			}
		}
		return nil
	}}
}

// client is an agent that plays a few turns of a session. Some of its requests are sent twice, or
// canceled.
type client struct {
	s       *gateway.Server
	session string
	mu      sync.Mutex
	paths   [][]uint32 // prompts with their completions, as the client received them
}

func (c *client) turn(ctx context.Context, seed uint64, prompt []uint32) ([]uint32, error) {
	stream := &collected{ctx: ctx}
	err := c.s.Complete(&gatewayv1.CompleteRequest{
		Model: "tiny", SessionId: c.session, Stream: true, Params: &inferencev1.SamplingParams{Seed: &seed}, Prompts: []*inferencev1.Prompt{tokens(prompt...)},
	}, stream)
	if err != nil {
		return nil, err
	}
	ids, _, _, last := stream.completion(0, 0)
	for at, id := range ids {
		if id != tokenAt(seed, 0, 0, at) {
			return nil, fmt.Errorf("token %d of %v was sent twice or is missing", at, ids)
		}
	}
	if spans := last.GetVersionSpans(); len(ids) != soakTokens || len(spans) != 1 || spans[0].GetEnd() != soakTokens {
		return nil, fmt.Errorf("%d tokens with the spans %v", len(ids), spans)
	}
	path := append(slices.Clone(prompt), ids...)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paths = append(c.paths, path)
	return path, nil
}

func (c *client) play(ctx context.Context, number int) error {
	prompt := []uint32{1, uint32(number)}
	for turn := range 3 {
		seed := uint64(number*10 + turn)
		switch rand.IntN(4) {
		case 0: // disconnects
			gone, cancel := context.WithTimeout(ctx, time.Duration(rand.IntN(5000))*time.Microsecond)
			_, err := c.turn(gone, seed, prompt)
			cancel()
			if err != nil && gone.Err() == nil {
				return err
			}
		case 1: // repeats a request, because it believes that it was lost
			var wg sync.WaitGroup
			wg.Go(func() { _, _ = c.turn(ctx, seed, prompt) })
			defer wg.Wait()
		}
		path, err := c.turn(ctx, seed, prompt)
		if err != nil {
			return err
		}
		prompt = append(path, uint32(turn))
	}
	return nil
}

// TestSoak plays 500 sessions while workers fail, leave, and clients disconnect and repeat their
// requests.
func TestSoak(t *testing.T) { //nolint:paralleltest // counts goroutines
	before := runtime.NumGoroutine()
	var running atomic.Int32
	workers := []*fakeWorker{unreliable(16, &running), unreliable(16, &running), unreliable(8, &running)}
	workers[0].deregistered = make(chan struct{})
	s, store, end := run(t, gateway.Config{QueueTimeout: 30 * time.Second}, workers...)
	var wg sync.WaitGroup
	clients := make([]*client, 500)
	failed := make(chan error, len(clients))
	for i := range clients {
		clients[i] = &client{s: s, session: fmt.Sprint("sess-", i)}
		wg.Go(func() { failed <- clients[i].play(t.Context(), i) })
	}
	for i := range clients {
		if err := <-failed; err != nil {
			t.Error(err)
		}
		if i == len(clients)/3 {
			close(workers[0].deregistered)
		}
	}
	wg.Wait()
	for _, c := range clients {
		checkLedger(t, store, c)
	}
	if err := <-end(); err != nil {
		t.Error(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; runtime.Gosched() {
		var stacks [1 << 20]byte
		all := string(stacks[:runtime.Stack(stacks[:], true)])
		leaked := strings.Count(all, "services/gateway.(*")
		if running.Load() == 0 && leaked == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d completions at the workers and %d goroutines of the gateway (%d before, %d now) remain: %s", running.Load(), leaked, before, runtime.NumGoroutine(), all)
		}
	}
}

// checkLedger fails the test unless each segment continues an earlier one, and each completion that
// the client has is a path of the session with the same tokens.
func checkLedger(t *testing.T, store *ledger, c *client) {
	t.Helper()
	session, err := store.Session(t.Context(), c.session, 0)
	if err != nil {
		t.Fatal(err)
	}
	paths := map[string][]uint32{"": nil}
	stored := map[string]bool{}
	for _, row := range session.GetSegments() {
		segment := row.GetSegment()
		parent, known := paths[segment.GetParentSegmentId()]
		if !known {
			t.Fatalf("segment %v continues an unknown one", segment)
		}
		path := slices.Clone(parent)
		for ids := segment.GetInline().GetTokenIds(); len(ids) > 0; ids = ids[4:] {
			path = append(path, binary.LittleEndian.Uint32(ids))
		}
		paths[segment.GetSegmentId()] = path
		stored[fmt.Sprint(path)] = true
	}
	for _, path := range c.paths {
		if !stored[fmt.Sprint(path)] {
			t.Errorf("session %s does not have %v", c.session, path)
		}
	}
}
