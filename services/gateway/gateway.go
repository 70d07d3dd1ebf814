// Package gateway serves the policies that are being trained: over gRPC, and over HTTP with the API
// of OpenAI (package openai). The target name of the service is rollout-gateway.
//
// A request goes to the inference worker of the run that has the fewest requests in flight, among
// the processes that the scheduler launched: other registrations are ignored. If the worker fails
// before the first token, another one gets the request; later failures are returned to the caller.
// Every completion belongs to a session. The ledger of the session has the token ids, logprobs, and
// weights versions exactly as they were sampled, and is durable before the caller receives the end.
// Text stays in Python: the worker renders chat templates, tokenizes, and detokenizes.
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
	ErrUnknownModel = rpcerr.New(codes.NotFound, ReasonUnknownModel, "no policy has this name; list the models for the served ones")
	ErrAmbiguous    = rpcerr.New(codes.InvalidArgument, ReasonAmbiguous, "several policies are served; name one")
	ErrNoWorker     = rpcerr.New(codes.Unavailable, ReasonNoWorker, "no inference worker is up; workers are up while a run samples: training on rows without evaluation has none").RetryAfter(time.Second)
	ErrSession      = rpcerr.New(codes.NotFound, ReasonSession, "no session has this id")
)

// Turn is one completion of a session.
type Turn = gatewayv1.SessionTurn

// Store keeps the ledger of sessions.
type Store interface {
	// Append adds turns to a session, in order. They survive a crash of the process when it
	// returns.
	Append(ctx context.Context, session string, turns []*Turn) error
	// Turns returns the turns of a session in order. ErrSession for an unknown session.
	Turns(ctx context.Context, session string) ([]*Turn, error)
	// Expire deletes the sessions whose newest turn is older than before, and returns how many.
	Expire(ctx context.Context, before time.Time) (sessions int, err error)
}
