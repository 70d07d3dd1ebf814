// Package gateway serves the policies that are being trained: over gRPC, and over HTTP as OpenAI's API (package openai).
// The service's target name is rollout-gateway.
//
// A request goes to the inference worker of the run with the fewest requests in hand; before its first token a failing
// worker is replaced by another, afterwards the failure is the caller's. Every completion belongs to a session, whose
// ledger keeps the very token ids, logprobs and weights versions that were sampled; it is durable before the caller sees
// the end. Text stays in Python: the worker renders chats, tokenises and detokenises.
package gateway

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
)

// Reasons of errors.
const (
	ReasonUnknownModel = "MODEL_NOT_FOUND"
	ReasonAmbiguous    = "MODEL_NOT_NAMED"
	ReasonNoWorker     = "NO_WORKER"
	ReasonSession      = "SESSION_NOT_FOUND"
)

// Errors of the service, compared with errors.Is.
var (
	ErrUnknownModel = rpcerr.New(codes.NotFound, ReasonUnknownModel, "no policy of this name is served; list the models to see which are")
	ErrAmbiguous    = rpcerr.New(codes.InvalidArgument, ReasonAmbiguous, "several policies are served; name one")
	ErrNoWorker     = rpcerr.New(codes.Unavailable, ReasonNoWorker, "no inference worker is up; one is there while a run trains").RetryAfter(time.Second)
	ErrSession      = rpcerr.New(codes.NotFound, ReasonSession, "no session of this id")
)

// Turn is one completion of a session.
type Turn = gatewayv1.SessionTurn

// Store keeps the ledger of sessions.
type Store interface {
	// Append adds turns to a session, in order. When it returns they survive the death of the process.
	Append(ctx context.Context, session string, turns []*Turn) error
	// Turns returns the turns of a session in order. ErrSession where there is none.
	Turns(ctx context.Context, session string) ([]*Turn, error)
	// Forget removes the sessions whose newest turn is older than before, whole, and returns how many.
	Forget(ctx context.Context, before time.Time) (sessions int, err error)
}
