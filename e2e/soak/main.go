// Command soak plays sessions of a run: some of its requests are canceled, sent twice, or repeated
// after an error. Afterwards it compares what it was sent with the ledger of each session, and with
// the trajectories that the run was trained on.
//
// Arguments: address of the control plane, file of the token, run. It ends with exit code 1 and the
// ids of the sessions if anything differs. The same seed plays the same sessions.
package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

type settings struct {
	run      string
	sessions int
	turns    int
	at       int // sessions at once
	seed     uint64
}

// counts is what was tried.
type counts struct{ requests, canceled, duplicates, repeated, closedTwice atomic.Int64 }

// soak plays sessions and verifies them.
type soak struct {
	settings
	gateway gatewayv1.RolloutGatewayServiceClient
	buffer  bufferv1.BufferServiceClient
	counts  counts

	mu       sync.Mutex
	sessions map[string]*session
	wrong    []string
}

// violation records a difference.
func (s *soak) violation(session, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wrong = append(s.wrong, session+": "+fmt.Sprintf(format, args...))
}

// session is one conversation, as its client saw it.
type session struct {
	id   string
	key  *trajectoryv1.TrajectoryKey
	rand *rand.Rand

	mu     sync.Mutex
	paths  [][]uint32 // prompts with their completions
	begun  [][]uint32 // prompts of canceled requests with the tokens that were received
	final  []uint32
	parts  uint32 // trajectories that the gateway made of it
	closed bool
}

// completion requests a completion, and returns the prompt with it.
func (s *soak) completion(ctx context.Context, c *session, seed uint64, prompt []uint32) (path []uint32, err error) {
	s.counts.requests.Add(1)
	path = slices.Clone(prompt)
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if err != nil {
			c.begun = append(c.begun, path)
			return
		}
		c.paths = append(c.paths, path)
	}()
	stream, err := s.gateway.Complete(ctx, &gatewayv1.CompleteRequest{
		Model: s.run, SessionId: c.id, Stream: true, Params: &inferencev1.SamplingParams{Seed: &seed, MaxTokens: proto.Uint32(12)},
		Prompts: []*inferencev1.Prompt{{Kind: &inferencev1.Prompt_Tokens{Tokens: &inferencev1.TokenIds{Ids: prompt}}}},
	})
	if err != nil {
		return path, err
	}
	finished := false
	for {
		resp, err := stream.Recv()
		if errors.Is(err, io.EOF) && finished {
			return path, nil
		}
		if err != nil {
			return path, err
		}
		piece := resp.GetPiece()
		path = append(path, piece.GetTokenIds()...)
		if len(piece.GetTokenIds()) != len(piece.GetLogprobs()) {
			s.violation(c.id, "%d tokens with %d logprobs", len(piece.GetTokenIds()), len(piece.GetLogprobs()))
		}
		if piece.GetFinishReason() == "" {
			continue
		}
		finished = true
		end := uint32(0)
		for _, span := range piece.GetVersionSpans() {
			if span.GetStart() != end || span.GetEnd() <= end {
				s.violation(c.id, "the spans %v have a gap", piece.GetVersionSpans())
			}
			end = span.GetEnd()
		}
		if int(end) != len(path)-len(prompt) {
			s.violation(c.id, "spans up to %d of %d tokens", end, len(path)-len(prompt))
		}
	}
}

// passing reports whether a request that failed with err is repeated.
func passing(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.ResourceExhausted, codes.DeadlineExceeded, codes.Aborted:
		return true
	}
	return false
}

// patient repeats call while its errors pass.
func (s *soak) patient(ctx context.Context, call func() error) error {
	for {
		err := call()
		if err == nil || !passing(err) {
			return err
		}
		s.counts.repeated.Add(1)
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// turn requests the next completion of a session, with what may go wrong at a client.
func (s *soak) turn(ctx context.Context, c *session, prompt []uint32) (path []uint32, err error) {
	seed := c.rand.Uint64() >> 1
	var wg sync.WaitGroup
	defer wg.Wait()
	switch c.rand.IntN(5) {
	case 0:
		s.counts.canceled.Add(1)
		gone, cancel := context.WithTimeout(ctx, time.Duration(c.rand.IntN(20_000))*time.Microsecond)
		_, err := s.completion(gone, c, seed, prompt)
		cancel()
		if err != nil && gone.Err() == nil && !passing(err) {
			return nil, err
		}
	case 1:
		s.counts.duplicates.Add(1)
		wg.Go(func() { _, _ = s.completion(ctx, c, seed, prompt) })
	}
	err = s.patient(ctx, func() (err error) {
		path, err = s.completion(ctx, c, seed, prompt)
		return err
	})
	return path, err
}

// play plays a session to its end.
func (s *soak) play(ctx context.Context, c *session, turns int) error {
	path := []uint32{64, 65, uint32(66 + c.rand.IntN(32))}
	for range turns {
		next, err := s.turn(ctx, c, path)
		if err != nil {
			return err
		}
		c.final = next
		path = append(slices.Clone(next), uint32(33+c.rand.IntN(90)), uint32(33+c.rand.IntN(90)))
	}
	end := &gatewayv1.CloseSessionRequest{SessionId: c.id, Reward: c.rand.Float64(), RunId: s.run}
	twice := c.rand.IntN(5) == 0
	var wg sync.WaitGroup
	defer wg.Wait()
	if twice {
		s.counts.closedTwice.Add(1)
		wg.Go(func() { _, _ = s.gateway.CloseSession(ctx, end) })
	}
	return s.patient(ctx, func() error {
		resp, err := s.gateway.CloseSession(ctx, end)
		c.parts, c.closed = resp.GetEnd().GetTrajectories(), resp.GetEnd().GetAccepted()
		return err
	})
}

// playAll takes prompts until the sessions are played.
func (s *soak) playAll(ctx context.Context) error {
	free := make(chan struct{}, s.at)
	var wg sync.WaitGroup
	defer wg.Wait()
	for number := 0; number < s.settings.sessions; {
		var next *gatewayv1.NextPromptsResponse
		err := s.patient(ctx, func() (err error) {
			next, err = s.gateway.NextPrompts(ctx, &gatewayv1.NextPromptsRequest{Model: s.run, MaxGroups: 8, WaitSeconds: 10})
			return err
		})
		if err != nil {
			return fmt.Errorf("take prompts: %w", err)
		}
		if next.GetEnded() {
			return fmt.Errorf("the run ended after %d sessions", number)
		}
		for _, task := range next.GetSessions() {
			c := &session{id: task.GetSessionId(), key: task.GetKey(), rand: rand.New(rand.NewPCG(s.seed, uint64(number)))} //nolint:gosec // reproducible
			number++
			s.mu.Lock()
			s.sessions[c.id] = c
			s.mu.Unlock()
			free <- struct{}{}
			wg.Go(func() {
				defer func() { <-free }()
				if err := s.play(ctx, c, s.turns); err != nil {
					s.violation(c.id, "%v", err)
				}
			})
			if number%1000 == 0 {
				fmt.Printf("%d sessions\n", number)
			}
		}
	}
	return nil
}

// pages requests the pages of a list one after the other.
func pages(page func(token string) (next string, err error)) error {
	for token := ""; ; {
		next, err := page(token)
		if err != nil || next == "" {
			return err
		}
		token = next
	}
}

func decode(raw []byte) []uint32 {
	ids := make([]uint32, 0, len(raw)/4)
	for ; len(raw) >= 4; raw = raw[4:] {
		ids = append(ids, binary.LittleEndian.Uint32(raw))
	}
	return ids
}

// paths returns the paths of a session from its ledger. Each segment must continue an earlier one.
func (s *soak) paths(ctx context.Context, c *session) map[string]bool {
	var found *gatewayv1.GetSessionResponse
	err := s.patient(ctx, func() error {
		found = &gatewayv1.GetSessionResponse{}
		return pages(func(token string) (string, error) {
			page, err := s.gateway.GetSession(ctx, &gatewayv1.GetSessionRequest{SessionId: c.id, PageToken: token})
			found.Segments = append(found.Segments, page.GetSegments()...)
			return page.GetNextPageToken(), err
		})
	})
	if err != nil {
		s.violation(c.id, "%v", err)
		return nil
	}
	byID := map[string][]uint32{"": nil}
	stored := map[string]bool{}
	for _, row := range found.GetSegments() {
		segment := row.GetSegment()
		parent, known := byID[segment.GetParentSegmentId()]
		if !known {
			s.violation(c.id, "segment %s continues the unknown segment %s", segment.GetSegmentId(), segment.GetParentSegmentId())
			return stored
		}
		path := append(slices.Clone(parent), decode(segment.GetInline().GetTokenIds())...)
		byID[segment.GetSegmentId()] = path
		stored[fmt.Sprint(path)] = true
	}
	return stored
}

// verify compares a session with its ledger.
func (s *soak) verify(ctx context.Context, c *session) {
	stored := s.paths(ctx, c)
	for _, path := range c.paths {
		if !stored[fmt.Sprint(path)] {
			s.violation(c.id, "the ledger does not have %v", path)
		}
	}
}

// sent reports whether the client received these tokens; those of a request that it canceled may
// continue after what it received.
func (c *session) sent(ids []uint32) bool {
	for _, path := range c.paths {
		if slices.Equal(path, ids) {
			return true
		}
	}
	for _, path := range c.begun {
		if len(path) <= len(ids) && slices.Equal(path, ids[:len(path)]) {
			return true
		}
	}
	return false
}

// trained compares the trajectories of all steps with the sessions. It returns their number.
func (s *soak) trained(ctx context.Context) (trajectories int, err error) {
	byKey := map[string]*session{}
	for _, c := range s.sessions {
		byKey[name(c.key)] = c
	}
	parts, final := map[*session]uint32{}, map[*session]bool{}
	var steps []*bufferv1.StepRecord
	err = pages(func(token string) (string, error) {
		page, err := s.buffer.ListSteps(ctx, &bufferv1.ListStepsRequest{RunId: s.run, PageToken: token})
		steps = append(steps, page.GetSteps()...)
		return page.GetNextPageToken(), err
	})
	if err != nil {
		return 0, err
	}
	for _, step := range steps {
		stream, err := s.buffer.ReadPayloads(ctx, &bufferv1.ReadPayloadsRequest{RunId: s.run, Step: step.GetStep()})
		if err != nil {
			return trajectories, err
		}
		for {
			resp, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return trajectories, fmt.Errorf("step %d: %w", step.GetStep(), err)
			}
			for _, raw := range resp.GetPayloads() {
				var t trajectoryv1.Trajectory
				if err := proto.Unmarshal(raw, &t); err != nil {
					return trajectories, err
				}
				trajectories++
				c := byKey[name(t.GetKey())]
				if c == nil {
					s.violation(name(t.GetKey()), "step %d trained on a session that was not played", step.GetStep())
					continue
				}
				ids := decode(t.GetTokenIds())
				if !c.sent(ids) {
					s.violation(c.id, "step %d trained on %v, which the client was not sent", step.GetStep(), ids)
				}
				parts[c]++
				final[c] = final[c] || slices.Equal(ids, c.final)
			}
		}
	}
	for c, n := range parts {
		if n != c.parts || !final[c] {
			s.violation(c.id, "%d of %d trajectories were trained, the last path among them: %t", n, c.parts, final[c])
		}
	}
	return trajectories, nil
}

func name(key *trajectoryv1.TrajectoryKey) string {
	return fmt.Sprintf("%d/%d/%d/%d", key.GetEpoch(), key.GetIndex(), key.GetAttempt(), key.GetSample())
}

func run(ctx context.Context, address, token string, cfg settings) error {
	secret, err := os.ReadFile(token)
	if err != nil {
		return err
	}
	bearer := func(ctx context.Context) context.Context {
		return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+strings.TrimSpace(string(secret)))
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx = bearer(ctx)
	s := &soak{settings: cfg, gateway: gatewayv1.NewRolloutGatewayServiceClient(conn), buffer: bufferv1.NewBufferServiceClient(conn), sessions: map[string]*session{}}
	began := time.Now()
	if err := s.playAll(ctx); err != nil {
		s.violation("the run", "%v", err)
	}
	played := time.Since(began)
	var wg sync.WaitGroup
	queue := make(chan *session)
	for range 8 {
		wg.Go(func() {
			for c := range queue {
				s.verify(ctx, c)
			}
		})
	}
	for _, c := range s.sessions {
		queue <- c
	}
	close(queue)
	wg.Wait()
	trajectories, err := s.trained(ctx)
	if err != nil {
		s.violation("the run", "read the trajectories: %v", err)
	}
	n := &s.counts
	fmt.Printf("%d sessions of %d turns in %s: %d requests, %d canceled, %d sent twice, %d repeated after an error, %d sessions closed twice\n",
		len(s.sessions), s.turns, played.Round(time.Second), n.requests.Load(), n.canceled.Load(), n.duplicates.Load(), n.repeated.Load(), n.closedTwice.Load())
	fmt.Printf("%d trajectories were trained; verified in %s\n", trajectories, (time.Since(began) - played).Round(time.Second))
	if len(s.wrong) == 0 {
		return nil
	}
	for _, line := range s.wrong[:min(len(s.wrong), 20)] {
		fmt.Println(line)
	}
	return fmt.Errorf("%d violations with the seed %d", len(s.wrong), cfg.seed)
}

func main() {
	var cfg settings
	flag.IntVar(&cfg.sessions, "sessions", 10_000, "sessions to play")
	flag.IntVar(&cfg.turns, "turns", 5, "turns of each")
	flag.IntVar(&cfg.at, "concurrent", 256, "sessions at once")
	flag.Uint64Var(&cfg.seed, "seed", 0, "seed of what the clients do; 0: random")
	flag.Parse()
	cfg.seed = cmp.Or(cfg.seed, rand.Uint64N(1<<32)+1)
	cfg.run = flag.Arg(2)
	fmt.Printf("seed %d\n", cfg.seed)
	if err := run(context.Background(), flag.Arg(0), flag.Arg(1), cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
