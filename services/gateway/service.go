package gateway

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// service is the use cases of both edges. Many goroutines may call its methods.
type service struct {
	Deps
	queueTimeout time.Duration
	workers      *directory
	metrics      *metrics
	limits       apikey.Limiter
	agents       *agents
}

// Models returns the served policies, ordered by name.
func (s *service) Models(ctx context.Context) []*gatewayv1.Model {
	return s.workers.models(ctx)
}

// Complete calls send for each piece when it arrives. It stores the segments of a completion before
// it sends the last piece of it.
func (s *service) Complete(ctx context.Context, req *gatewayv1.CompleteRequest, send func(*gatewayv1.CompleteResponse) error) (err error) {
	defer func() { s.agents.refused.ended(req.GetSessionId(), s.Now(), err) }()
	leave, err := s.workers.enter()
	if err != nil {
		return err
	}
	defer leave()
	key := apikey.From(ctx)
	if key != nil {
		if err := s.limits.Begin(key, time.Now()); err != nil {
			return err
		}
	}
	run, name, err := s.workers.resolve(ctx, req.GetModel())
	if err != nil {
		return err
	}
	session, err := s.open(ctx, req.GetSessionId(), run, req.GetPrompts())
	if err != nil {
		return err
	}
	if err := s.agents.checkSampling(ctx, session, req.GetParams()); err != nil {
		return err
	}
	rec, seen := newRecorder(s.callOf(req), s.Now), s.metrics.begin(req, name)
	need := needOf(req)
	need.versionFloor = session.floor(need.versionFloor)
	err = s.complete(ctx, run, need, rec, &delivery{
		session: session,
		send: func(piece *inferencev1.GenerateResponse) error {
			seen.piece()
			return send(&gatewayv1.CompleteResponse{SessionId: session.id, Piece: piece, Model: name, RunId: run})
		},
	})
	seen.end(ctx, rec, err)
	if key != nil {
		s.limits.Add(key, rec.promptTokens()+rec.tokens, time.Now())
	}
	return err
}

// delivery is where the pieces of a request go.
type delivery struct {
	session *conversation
	send    func(*inferencev1.GenerateResponse) error
}

// deliver sends a piece. It stores the completion that ends with it before; nil: it continues.
func (d *delivery) deliver(ctx context.Context, w *worker, piece *inferencev1.GenerateResponse, done *completion, prompt *inferencev1.Prompt) error {
	if done != nil {
		if err := d.session.append(ctx, w, done, prompt); err != nil {
			return err
		}
	}
	return d.send(piece)
}

// callOf returns the call of a worker for a request. It has a seed, so that another worker samples
// the same tokens.
func (s *service) callOf(req *gatewayv1.CompleteRequest) *inferencev1.GenerateRequest {
	params := &inferencev1.SamplingParams{}
	if req.GetParams() != nil {
		params = proto.CloneOf(req.GetParams())
	}
	if params.Seed == nil {
		params.Seed = proto.Uint64(rand.Uint64() >> 1)
	}
	return &inferencev1.GenerateRequest{
		RequestId: cmp.Or(req.GetRequestId(), "req-"+id.New(s.Now())), Prompts: req.GetPrompts(), Params: params, N: max(1, req.GetN()), Stream: req.GetStream(),
		PromptLogprobs: req.GetPromptLogprobs(), PromptTopLogprobs: req.GetPromptTopLogprobs(), Parse: req.GetParse(), TokenBytes: req.GetTokenBytes(),
		WeightsVersion: req.WeightsVersion,
	}
}

// How long a request that all workers failed waits before it tries them again. The pause doubles.
const (
	retryPause    = 100 * time.Millisecond
	retryPauseMax = 2 * time.Second
)

// complete samples a request with one worker after another until it is complete. It gives up when
// the request has got no token for the queue timeout.
func (s *service) complete(ctx context.Context, run string, n need, rec *recorder, to *delivery) error {
	var failure error // of the last worker; nil: none failed yet
	n.avoid = map[string]bool{}
	since, pause := time.Now(), retryPause
	for {
		left := s.queueTimeout - time.Since(since)
		timeout := left
		if len(n.avoid) > 0 {
			timeout = min(left, pause)
		}
		l, err := s.workers.acquire(ctx, run, n, timeout, failure != nil)
		if err != nil && len(n.avoid) > 0 && left > pause && rpcerr.Code(err) == codes.Unavailable && ctx.Err() == nil {
			n.avoid, pause = map[string]bool{}, min(retryPauseMax, 2*pause)
			continue
		}
		if err != nil && rpcerr.Reason(err) == ReasonVersion && failure == nil && len(n.avoid) == 0 {
			s.workers.refreshAll(ctx, run) // a worker may have got the version since its last status
			l, err = s.workers.acquire(ctx, run, n, timeout, false)
		}
		if err != nil {
			return refused(err, failure, rec)
		}
		before := rec.tokens
		workerErr, callerErr := s.generate(ctx, l, rec, to)
		if rpcerr.Reason(workerErr) == reasonMissing {
			l.cache.set(to.session.id, 0)
			workerErr, callerErr = s.generate(ctx, l, rec, to)
		}
		l.release(workerErr, callerErr != nil || ctx.Err() != nil)
		if callerErr != nil || workerErr == nil {
			return callerErr
		}
		if ctx.Err() != nil || !retried(workerErr) {
			return workerErr
		}
		if rec.tokens > before {
			n.avoid = map[string]bool{}
			since, pause = time.Now(), retryPause
		}
		n.avoid[l.id] = true
		failure = workerErr
		s.Log.InfoContext(ctx, "an inference worker failed; another one continues the request", "request", rec.call.GetRequestId(), "worker", l.id, "tokens", rec.tokens, "error", workerErr)
	}
}

// refused returns the error of a request that no worker takes: the failure of the last worker, if
// there is one, explains more than the obstacle.
func refused(err, failure error, rec *recorder) error {
	if failure == nil || rpcerr.Code(err) != codes.Unavailable {
		return err
	}
	if !rec.begun() {
		return failure
	}
	return ErrInterrupted.WithMessage("%s after %d tokens: %s", ErrInterrupted, rec.tokens, rpcerr.Text(failure))
}

// reasonDuplicate is the error of a worker that has not ended the request yet, although the gateway
// has: it is tried again after the others.
const reasonDuplicate = "DUPLICATE_REQUEST"

// retried reports whether another worker gets a request that a worker failed with err.
func retried(err error) bool {
	code, reason := rpcerr.Code(err), rpcerr.Reason(err)
	return code == codes.Unavailable || code == codes.ResourceExhausted || reason == ReasonVersion || reason == reasonDuplicate
}

// generate sends the request to one worker and reads its response to the end. It returns the error
// of the worker, or of the caller.
func (s *service) generate(ctx context.Context, l *lease, rec *recorder, to *delivery) (worker, caller error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // aborts the request at the worker if the caller is gone
	state, err := to.session.state(ctx, l.worker)
	if err != nil {
		return nil, err
	}
	stream, err := l.client.Generate(ctx, rec.request(state))
	if err != nil {
		return err, nil
	}
	version := uint64(0)
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if !rec.complete() {
				return rpcerr.New(codes.Unavailable, ReasonNoWorker, "the worker stopped before the end of the completion").RetryAfter(time.Second), nil
			}
			return nil, nil
		}
		if err != nil {
			if ctx.Err() == nil && status.Code(err) == codes.Canceled { // the connection was closed, not by the caller
				err = rpcerr.New(codes.Unavailable, ReasonNoWorker, "the worker exited before the end of the completion").RetryAfter(time.Second)
			}
			return err, nil
		}
		l.begin()
		if piece.GetWeightsVersion() > version {
			version = piece.GetWeightsVersion()
			s.workers.observe(l.worker, version)
		}
		keep, done, err := rec.add(piece)
		if err != nil {
			return err, nil
		}
		if !keep {
			continue
		}
		if err := to.deliver(ctx, l.worker, piece, done, rec.call.GetPrompts()[piece.GetPrompt()]); err != nil {
			return nil, err
		}
	}
}

// Session returns a session with its segments from number first on.
func (s *service) Session(ctx context.Context, session string, first int) (*Session, error) {
	return s.Store.Session(ctx, session, first)
}

const (
	sessionTTL  = 7 * 24 * time.Hour  // since the newest segment; an active session keeps all of them
	keyTTL      = 30 * 24 * time.Hour // since a key has expired; until then it is refused as expired
	expireEvery = time.Hour
)

// expire deletes old sessions and keys, now and periodically, until ctx ends.
func (s *service) expire(ctx context.Context) {
	tick := time.NewTicker(expireEvery)
	defer tick.Stop()
	for {
		n, err := s.Store.Expire(ctx, s.Now().Add(-sessionTTL))
		if err == nil {
			_, err = s.Store.ExpireKeys(ctx, s.Now().Add(-keyTTL))
		}
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			s.Log.WarnContext(ctx, "deleting expired sessions and API keys failed and is repeated", "error", err)
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

func timestamp(t time.Time) *timestamppb.Timestamp { return timestamppb.New(t.UTC()) }
