// Package gateway serves the policies that are being trained: over gRPC, and over HTTP with the
// APIs of OpenAI, Anthropic, vLLM, and SGLang (package edge). The target name of the service is
// rollout-gateway.
//
// A request goes to an inference worker of the run, among the processes that the scheduler
// launched: other registrations are ignored. Requests of a session, and those whose prompts begin
// alike, go to the same worker, unless it has much more to do than the others (file route.go). A
// request waits while all workers are busy. If its worker fails, another one gets it. After the
// first token, the next worker continues after the tokens that the caller has, with the same seed
// (file stitch.go). Every completion belongs to a session, which is a tree of segments. Its ledger
// has the token ids, logprobs, and weights versions exactly as they were sampled, and is durable
// before the caller receives the end. Several gateways may share the ledger. Text stays in Python:
// the worker renders chat templates, tokenizes, and detokenizes.
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
	ReasonBusy         = "WORKERS_BUSY"
	ReasonVersion      = "WEIGHTS_NOT_FOUND"
	ReasonBehind       = "WEIGHTS_NOT_REACHED"
	ReasonInterrupted  = "COMPLETION_INTERRUPTED"
	ReasonSessionRun   = "SESSION_OF_ANOTHER_RUN"
	ReasonSegment      = "SEGMENT_CONFLICT"
)

// Errors of the service, compared with errors.Is.
var (
	ErrUnknownModel = rpcerr.New(codes.NotFound, ReasonUnknownModel, "no policy has this name; list the models for the served ones")
	ErrAmbiguous    = rpcerr.New(codes.InvalidArgument, ReasonAmbiguous, "several policies are served; name one")
	ErrNoWorker     = rpcerr.New(codes.Unavailable, ReasonNoWorker, "no inference worker is up; workers are up while a run samples: training on rows without evaluation has none").RetryAfter(time.Second)
	// ErrInterrupted ends a stream that no worker continues.
	ErrInterrupted = rpcerr.New(codes.Unavailable, ReasonInterrupted, "the completion was interrupted, and no worker continues it").RetryAfter(time.Second)
	ErrSession     = rpcerr.New(codes.NotFound, ReasonSession, "no session has this id")
	ErrSessionRun  = rpcerr.New(codes.FailedPrecondition, ReasonSessionRun, "the session belongs to another run").
			Fix("start a new session for each model")
	ErrSegmentConflict = rpcerr.New(codes.Aborted, ReasonSegment, "the session has a different segment with this id")
)

// Segment is a segment of a session and the request that appended it.
type Segment = gatewayv1.SessionSegment

// Session is the segments of a session, parents first.
type Session = gatewayv1.GetSessionResponse

// Store keeps the ledger of sessions. Several gateways may share one.
type Store interface {
	// Append adds segments to a session, parents first, and creates the session for the run. first
	// is the number of segments that it had before. A segment that it has already is skipped.
	// Segments survive a crash of the process when it returns. ErrSessionRun if the session belongs
	// to another run; ErrSegmentConflict if it has a different segment with the same id, and then
	// nothing is added.
	Append(ctx context.Context, session, run string, segments []*Segment) (first int, err error)
	// Session returns the session with its segments from number from on. ErrSession.
	Session(ctx context.Context, session string, from int) (*Session, error)
	// Expire deletes the sessions whose newest segment is older than before, and returns how many.
	Expire(ctx context.Context, before time.Time) (sessions int, err error)
}
