package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// service is the use cases; both edges call it. Its methods may be called from many goroutines.
type service struct {
	Deps
	dir *directory
}

// Models returns the policies that are served now, by name.
func (s *service) Models(ctx context.Context) []*gatewayv1.Model { return s.dir.models(ctx) }

// Complete hands each piece to send as it arrives. The session's ledger is written before the last piece of all is sent.
func (s *service) Complete(ctx context.Context, req *gatewayv1.CompleteRequest, send func(*gatewayv1.CompleteResponse) error) error {
	run, name, err := s.dir.resolve(req.GetModel())
	if err != nil {
		return err
	}
	session := cmp.Or(req.GetSessionId(), "sess-"+id.New(s.Now()))
	call := &inferencev1.GenerateRequest{
		RequestId: "req-" + id.New(s.Now()), Prompts: req.GetPrompts(), Params: req.GetParams(), N: max(1, req.GetN()), Stream: req.GetStream(),
		PromptLogprobs: req.GetPromptLogprobs(),
	}
	book := newBook(call, s.Now)
	tried := map[*worker]bool{}
	failure := error(ErrNoWorker)
	for {
		w, release := s.dir.take(run, tried)
		if w == nil {
			return failure
		}
		tried[w] = true
		err := s.generate(ctx, w, call, book, func(piece *inferencev1.GenerateResponse) error {
			if book.whole() && !book.kept {
				book.kept = true
				if err := s.Store.Append(ctx, session, book.turns()); err != nil {
					return fmt.Errorf("keep the session: %w", err)
				}
			}
			return send(&gatewayv1.CompleteResponse{SessionId: session, Piece: piece, Model: name, RunId: run})
		})
		release()
		if err == nil || book.begun || ctx.Err() != nil || rpcerr.Code(err) != codes.Unavailable {
			return err
		}
		failure = err
	}
}

// generate follows one worker's answer to its end.
func (s *service) generate(ctx context.Context, w *worker, call *inferencev1.GenerateRequest, book *book, send func(*inferencev1.GenerateResponse) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // a caller that left aborts the request at the worker
	stream, err := w.client.Generate(ctx, call)
	if err != nil {
		return err
	}
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if !book.whole() {
				return rpcerr.New(codes.Unavailable, ReasonNoWorker, "the worker stopped before the completion's end").RetryAfter(time.Second)
			}
			return nil
		}
		if err != nil {
			if ctx.Err() == nil && status.Code(err) == codes.Canceled { // not by the caller: the connection was closed
				err = rpcerr.New(codes.Unavailable, ReasonNoWorker, "the worker left before the completion's end").RetryAfter(time.Second)
			}
			return err
		}
		if err := book.add(piece); err != nil {
			return err
		}
		if err := send(piece); err != nil {
			return err
		}
	}
}

// Session returns the turns of a session.
func (s *service) Session(ctx context.Context, session string) ([]*Turn, error) {
	return s.Store.Turns(ctx, session)
}

const (
	sessionsKept = 7 * 24 * time.Hour // after its newest turn a session is forgotten; one that goes on keeps all of its turns
	forgetEvery  = time.Hour
)

// forget removes old sessions, now and from time to time, until ctx ends.
func (s *service) forget(ctx context.Context) {
	tick := time.NewTicker(forgetEvery)
	defer tick.Stop()
	for {
		n, err := s.Store.Forget(ctx, s.Now().Add(-sessionsKept))
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			s.Log.Warn("old sessions were not forgotten, trying again later", "error", err)
		case n > 0:
			s.Log.Info("old sessions were forgotten", "sessions", n)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// book gathers the pieces of a request into turns.
type book struct {
	now   func() time.Time
	begun bool
	kept  bool // in the ledger
	open  int  // completions that have not ended
	list  [][]*Turn
}

func newBook(call *inferencev1.GenerateRequest, now func() time.Time) *book {
	b := &book{now: now, open: len(call.GetPrompts()) * int(call.GetN())}
	for p := range call.GetPrompts() {
		row := make([]*Turn, call.GetN())
		for n := range row {
			row[n] = &Turn{RequestId: call.GetRequestId(), Prompt: uint32(p), Sample: uint32(n)}
		}
		b.list = append(b.list, row)
	}
	return b
}

func (b *book) add(piece *inferencev1.GenerateResponse) error {
	b.begun = true
	if int(piece.GetPrompt()) >= len(b.list) || int(piece.GetSample()) >= len(b.list[piece.GetPrompt()]) {
		return rpcerr.New(codes.Internal, "BAD_PIECE", "the worker sent a piece of a completion that nobody asked for")
	}
	t := b.list[piece.GetPrompt()][piece.GetSample()]
	t.TokenIds = append(t.TokenIds, piece.GetTokenIds()...)
	t.Logprobs = append(t.Logprobs, piece.GetLogprobs()...)
	if piece.GetFinishReason() != "" && t.FinishReason == "" {
		t.FinishReason, t.VersionSpans, t.PromptTokenIds = piece.GetFinishReason(), piece.GetVersionSpans(), piece.GetPromptTokenIds()
		t.Time = timestamp(b.now())
		b.open--
	}
	return nil
}

func (b *book) whole() bool { return b.open == 0 }

func (b *book) turns() []*Turn { return slices.Concat(b.list...) }

func timestamp(t time.Time) *timestamppb.Timestamp { return timestamppb.New(t.UTC()) }
