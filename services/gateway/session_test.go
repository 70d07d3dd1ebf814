package gateway_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	sessionv1 "github.com/rollout-rl/rollout/proto/gen/rollout/session/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// chatter is a worker that keeps sessions. A turn is one prompt segment and one completion; the
// prompt continues the newest segment.
type chatter struct {
	fakeWorker

	mu       sync.Mutex
	sessions map[string][]*sessionv1.Segment
	sent     []string // `known+segments` of each request
}

func newChatter() *chatter {
	c := &chatter{sessions: map[string][]*sessionv1.Segment{}}
	c.model, c.generate = "tiny", c.turn
	return c
}

func (c *chatter) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.sessions)
}

func (c *chatter) requests() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.sent)
}

func (c *chatter) turn(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	state := req.GetSession()
	c.sent = append(c.sent, fmt.Sprintf("%d+%d", state.GetKnown(), len(state.GetSegments())))
	have := c.sessions[state.GetSessionId()]
	switch {
	case state.GetKnown() == 0:
		have = nil
	case int(state.GetKnown()) > len(have):
		return rpcerr.New(codes.FailedPrecondition, "SESSION_SEGMENTS_MISSING", "the worker has %d segments", len(have))
	}
	have = append(slices.Clone(have[:state.GetKnown()]), state.GetSegments()...)
	parent := ""
	if n := len(have); n > 0 {
		parent = have[n-1].GetSegmentId()
	}
	prompt := inline(state.GetSessionId(), fmt.Sprintf("s%d", len(have)), parent, sessionv1.Role_ROLE_USER, 1, 2)
	answer := inline(state.GetSessionId(), fmt.Sprintf("s%d", len(have)+1), prompt.GetSegmentId(), sessionv1.Role_ROLE_ASSISTANT, 3)
	prompt.Messages = []string{`{"role":"user","content":"hi"}`}
	c.sessions[state.GetSessionId()] = append(have, prompt, answer)
	return stream.Send(&inferencev1.GenerateResponse{
		Text: "three", TokenIds: []uint32{3}, Logprobs: []float32{-1}, FinishReason: "stop", Segments: []*sessionv1.Segment{prompt, answer},
	})
}

func inline(session, name, parent string, role sessionv1.Role, ids ...uint32) *sessionv1.Segment {
	tokens := &sessionv1.SegmentTokens{LossMask: make([]byte, len(ids))}
	for _, id := range ids {
		tokens.TokenIds = binary.LittleEndian.AppendUint32(tokens.TokenIds, id)
	}
	return &sessionv1.Segment{SegmentId: name, SessionId: session, ParentSegmentId: parent, Role: role, Tokens: uint32(len(ids)), Inline: tokens}
}

// call completes a prompt and fails the test if that fails.
func call(t *testing.T, s *gateway.Server, session string, prompt *inferencev1.Prompt) *inferencev1.GenerateResponse {
	t.Helper()
	stream := &collected{ctx: t.Context()}
	if err := s.Complete(&gatewayv1.CompleteRequest{Model: "tiny", SessionId: session, Params: &inferencev1.SamplingParams{}, Prompts: []*inferencev1.Prompt{prompt}}, stream); err != nil {
		t.Fatal(err)
	}
	return stream.pieces[len(stream.pieces)-1].GetPiece()
}

func chat() *inferencev1.Prompt {
	return &inferencev1.Prompt{Kind: &inferencev1.Prompt_Chat{Chat: &inferencev1.Chat{Messages: []*inferencev1.ChatMessage{{Role: "user", Content: "hi"}}}}}
}

func tokens(ids ...uint32) *inferencev1.Prompt {
	return &inferencev1.Prompt{Kind: &inferencev1.Prompt_Tokens{Tokens: &inferencev1.TokenIds{Ids: ids}}}
}

// A worker gets the segments that it does not have, from this gateway or another one.
func TestWorkersGetTheSegmentsThatTheyMiss(t *testing.T) {
	t.Parallel()
	worker := newChatter()
	store := &ledger{sessions: map[string]*gateway.Session{}, expired: make(chan time.Time, 1)}
	one, _, _ := runOn(t, gateway.Config{}, store, &worker.fakeWorker)
	other, _, _ := runOn(t, gateway.Config{}, store, &worker.fakeWorker)
	call(t, one, "sess-1", chat())
	call(t, one, "sess-1", chat())
	call(t, other, "sess-1", chat())
	call(t, one, "sess-1", chat()) // the other gateway appended two segments
	worker.forget()
	call(t, one, "sess-1", chat())
	want := []string{"0+0", "2+0", "0+4", "4+2", "8+0", "0+8"}
	if got := worker.requests(); !slices.Equal(got, want) {
		t.Errorf("the worker was sent %v, want %v", got, want)
	}
	got, err := store.Session(t.Context(), "sess-1", 0)
	if err != nil || len(got.GetSegments()) != 10 {
		t.Fatalf("got %v, %v", got, err)
	}
	for i, s := range got.GetSegments()[1:] {
		if parent := got.GetSegments()[i].GetSegment().GetSegmentId(); s.GetSegment().GetParentSegmentId() != parent {
			t.Errorf("segment %d continues %s, not %s", i+1, s.GetSegment().GetParentSegmentId(), parent)
		}
	}
}

// reads is a store that records from where sessions are read.
type reads struct {
	gateway.Store
	mu   sync.Mutex
	from []int
}

func (r *reads) Session(ctx context.Context, session string, from int) (*gateway.Session, error) {
	r.mu.Lock()
	r.from = append(r.from, from)
	r.mu.Unlock()
	return r.Store.Session(ctx, session, from)
}

// A turn reads only the segments that no worker has. A worker that has lost its copy gets all of
// them, and so does the worker of a session that expired and began again.
func TestTurnsReadOnlyNewSegments(t *testing.T) {
	t.Parallel()
	worker := newChatter()
	store := &ledger{sessions: map[string]*gateway.Session{}, expired: make(chan time.Time, 1)}
	recorded := &reads{Store: store}
	s, _, _ := runWith(t, gateway.Config{}, store, func(d *gateway.Deps) { d.Store = recorded }, &worker.fakeWorker)
	for range 3 {
		call(t, s, "sess-1", chat())
	}
	worker.forget()
	call(t, s, "sess-1", chat())
	store.mu.Lock()
	store.sessions["sess-1"].Segments = nil
	store.mu.Unlock()
	call(t, s, "sess-1", chat())
	if want := []int{0, 1, 3, 5, 0, 7, 0}; !slices.Equal(recorded.from, want) {
		t.Errorf("sessions were read from %v, want %v", recorded.from, want)
	}
	if want, got := []string{"0+0", "2+0", "4+0", "6+0", "0+6", "0+0"}, worker.requests(); !slices.Equal(got, want) {
		t.Errorf("the worker was sent %v, want %v", got, want)
	}
}

// Two workers that continue the same session at the same time choose the same ids. Both branches
// are stored.
func TestTwoRequestsContinueOneSession(t *testing.T) {
	t.Parallel()
	worker := newChatter()
	store := &ledger{sessions: map[string]*gateway.Session{}, expired: make(chan time.Time, 1)}
	s, _, _ := runOn(t, gateway.Config{}, store, &worker.fakeWorker)
	call(t, s, "sess-1", chat())
	worker.mu.Lock()
	turn := worker.generate
	worker.generate = func(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
		other := inline("sess-1", "s2", "s1", sessionv1.Role_ROLE_USER, 9)
		if _, err := store.Append(t.Context(), "sess-1", "run-tiny", []*gateway.Segment{{Segment: other}}); err != nil {
			t.Error(err)
		}
		return turn(req, stream)
	}
	worker.mu.Unlock()
	last := call(t, s, "sess-1", chat()).GetSegments()
	worker.generate = turn
	call(t, s, "sess-1", chat())
	if want := []string{"0+0", "2+0", "0+5"}; !slices.Equal(worker.requests(), want) {
		t.Errorf("the worker was sent %v, want %v", worker.requests(), want)
	}
	got, err := store.Session(t.Context(), "sess-1", 0)
	if err != nil || len(got.GetSegments()) != 7 {
		t.Fatalf("got %v, %v", got, err)
	}
	for i, s := range last { // the caller sees the stored ids
		if !proto.Equal(got.GetSegments()[3+i].GetSegment(), s) {
			t.Errorf("the store has %v, the caller %v", got.GetSegments()[3+i], s)
		}
	}
	if last[1].GetParentSegmentId() != last[0].GetSegmentId() || last[0].GetParentSegmentId() != "s1" {
		t.Errorf("renamed to %v", last)
	}
}

// The gateway makes the tree of prompts of tokens: a prompt that starts with a known path continues
// it.
func TestTokensContinueASession(t *testing.T) {
	t.Parallel()
	s, store := serve(t, gateway.Config{}, &fakeWorker{model: "tiny", generate: func(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
		return stream.Send(&inferencev1.GenerateResponse{
			TokenIds: []uint32{3}, Logprobs: []float32{-1}, FinishReason: "stop", PromptTokenIds: req.GetPrompts()[0].GetTokens().GetIds(),
		})
	}})
	call(t, s, "sess-1", tokens(1, 2))
	call(t, s, "sess-1", tokens(1, 2, 3, 4))
	call(t, s, "sess-1", tokens(1, 2, 3, 4)) // again
	call(t, s, "sess-1", tokens(1, 2, 8))    // the client changed the answer
	got, err := store.Session(t.Context(), "sess-1", 0)
	if err != nil {
		t.Fatal(err)
	}
	var tree []string
	for _, s := range got.GetSegments() {
		segment := s.GetSegment()
		tree = append(tree, fmt.Sprintf("%s<%s %d %d", segment.GetSegmentId(), segment.GetParentSegmentId(), segment.GetTokens(), segment.GetForkReason()))
	}
	want := []string{"s0< 2 0", "s1<s0 1 0", "s2<s1 1 0", "s3<s2 1 0", "s4<s2 1 1", "s5<s0 1 2", "s6<s5 1 0"}
	if !slices.Equal(tree, want) {
		t.Errorf("got %v, want %v", tree, want)
	}
}

func TestASessionBelongsToOneRun(t *testing.T) {
	t.Parallel()
	s, _ := serve(t, gateway.Config{}, &fakeWorker{model: "tiny"}, &fakeWorker{model: "other"})
	call(t, s, "sess-1", chat())
	stream := &collected{ctx: t.Context()}
	err := s.Complete(&gatewayv1.CompleteRequest{Model: "other", SessionId: "sess-1", Prompts: []*inferencev1.Prompt{chat()}}, stream)
	if rpcerr.Reason(err) != gateway.ReasonSessionRun {
		t.Fatalf("got %v", err)
	}
}

// collected keeps what a call of Complete sends.
type collected struct {
	grpc.ServerStreamingServer[gatewayv1.CompleteResponse]
	ctx    context.Context
	pieces []*gatewayv1.CompleteResponse
}

func (c *collected) Context() context.Context { return c.ctx }

func (c *collected) Send(piece *gatewayv1.CompleteResponse) error {
	c.pieces = append(c.pieces, piece)
	return nil
}
