package gateway

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// service is the use cases of both edges. Many goroutines may call its methods.
type service struct {
	Deps
	workers *directory
}

// Models returns the served policies, ordered by name.
func (s *service) Models(ctx context.Context) []*gatewayv1.Model { return s.workers.models(ctx) }

// Complete calls send for each piece when it arrives. It stores the segments of a completion before
// it sends the last piece of it.
func (s *service) Complete(ctx context.Context, req *gatewayv1.CompleteRequest, send func(*gatewayv1.CompleteResponse) error) error {
	run, name, err := s.workers.resolve(req.GetModel())
	if err != nil {
		return err
	}
	session, err := s.open(ctx, req.GetSessionId(), run, req.GetPrompts())
	if err != nil {
		return err
	}
	call := &inferencev1.GenerateRequest{
		RequestId: "req-" + id.New(s.Now()), Prompts: req.GetPrompts(), Params: req.GetParams(), N: max(1, req.GetN()), Stream: req.GetStream(),
		PromptLogprobs: req.GetPromptLogprobs(), Parse: req.GetParse(), TokenBytes: req.GetTokenBytes(), PromptTopLogprobs: req.GetPromptTopLogprobs(),
	}
	rec := newRecorder(call, s.Now)
	tried := map[*worker]bool{}
	failure := error(ErrNoWorker)
	for {
		w, release := s.workers.acquire(run, tried)
		if w == nil {
			return failure
		}
		tried[w] = true
		attempt := func() error {
			call.Session = session.state(w)
			return s.generate(ctx, w, call, rec, func(piece *inferencev1.GenerateResponse, done *completion) error {
				if done != nil {
					if err := session.append(ctx, w, done, req.GetPrompts()[piece.GetPrompt()]); err != nil {
						return err
					}
				}
				return send(&gatewayv1.CompleteResponse{SessionId: session.id, Piece: piece, Model: name, RunId: run})
			})
		}
		err := attempt()
		if !rec.begun && rpcerr.Reason(err) == reasonMissing {
			w.cache.set(session.id, 0)
			err = attempt()
		}
		release()
		if err == nil || rec.begun || ctx.Err() != nil || rpcerr.Code(err) != codes.Unavailable {
			return err
		}
		failure = err
	}
}

// generate sends the request to one worker and reads its response to the end. done is the
// completion that ends with the piece; nil if it continues.
func (s *service) generate(ctx context.Context, w *worker, call *inferencev1.GenerateRequest, rec *recorder, send func(piece *inferencev1.GenerateResponse, done *completion) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // aborts the request at the worker if the caller is gone
	stream, err := w.client.Generate(ctx, call)
	if err != nil {
		return err
	}
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if !rec.complete() {
				return rpcerr.New(codes.Unavailable, ReasonNoWorker, "the worker stopped before the end of the completion").RetryAfter(time.Second)
			}
			return nil
		}
		if err != nil {
			if ctx.Err() == nil && status.Code(err) == codes.Canceled { // the connection was closed, not by the caller
				err = rpcerr.New(codes.Unavailable, ReasonNoWorker, "the worker exited before the end of the completion").RetryAfter(time.Second)
			}
			return err
		}
		done, err := rec.add(piece)
		if err != nil {
			return err
		}
		if err := send(piece, done); err != nil {
			return err
		}
	}
}

// Session returns the segments of a session.
func (s *service) Session(ctx context.Context, session string) (*Session, error) {
	return s.Store.Session(ctx, session, 0)
}

const (
	sessionTTL  = 7 * 24 * time.Hour // since the newest segment; an active session keeps all of them
	expireEvery = time.Hour
)

// expire deletes old sessions, now and periodically, until ctx ends.
func (s *service) expire(ctx context.Context) {
	tick := time.NewTicker(expireEvery)
	defer tick.Stop()
	for {
		n, err := s.Store.Expire(ctx, s.Now().Add(-sessionTTL))
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			s.Log.WarnContext(ctx, "deleting expired sessions failed and is repeated", "error", err)
		case n > 0:
			s.Log.InfoContext(ctx, "deleted expired sessions", "sessions", n)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// recorder collects the pieces of a request.
type recorder struct {
	now   func() time.Time
	begun bool
	open  int             // completions that have not ended
	list  [][]*completion // by prompt and sample
}

func newRecorder(call *inferencev1.GenerateRequest, now func() time.Time) *recorder {
	r := &recorder{now: now, open: len(call.GetPrompts()) * int(call.GetN())}
	for p := range call.GetPrompts() {
		row := make([]*completion, call.GetN())
		for n := range row {
			row[n] = &completion{request: call.GetRequestId(), prompt: uint32(p), sample: uint32(n)}
		}
		r.list = append(r.list, row)
	}
	return r
}

// add adds a piece, and returns the completion that it ends; nil if it ends none.
func (r *recorder) add(piece *inferencev1.GenerateResponse) (*completion, error) {
	r.begun = true
	if int(piece.GetPrompt()) >= len(r.list) || int(piece.GetSample()) >= len(r.list[piece.GetPrompt()]) {
		return nil, rpcerr.New(codes.Internal, "BAD_PIECE", "the worker sent a piece of a completion that was not requested")
	}
	c := r.list[piece.GetPrompt()][piece.GetSample()]
	ended, err := c.add(piece, r.now())
	if !ended || err != nil {
		return nil, err
	}
	r.open--
	return c, nil
}

func (r *recorder) complete() bool { return r.open == 0 }

func timestamp(t time.Time) *timestamppb.Timestamp { return timestamppb.New(t.UTC()) }
