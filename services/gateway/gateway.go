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

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
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
	ReasonClosed       = "SESSION_CLOSED"
	ReasonEmpty        = "SESSION_EMPTY"
	ReasonNoGroup      = "SESSION_WITHOUT_GROUP"
	ReasonRunAway      = "RUN_TAKES_NO_SAMPLES"
	ReasonNotExternal  = "ENVIRONMENT_NOT_EXTERNAL"
	ReasonSampling     = "SAMPLING_NOT_TRAINABLE"
	ReasonResponse     = "RESPONSE_NOT_FOUND"
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
	ErrSessionClosed = rpcerr.New(codes.FailedPrecondition, ReasonClosed, "the session is closed").
				Fix("start a new session, or take the next prompts")
	ErrSessionEmpty = rpcerr.New(codes.FailedPrecondition, ReasonEmpty, "nothing was sampled in the session").
			Fix("send at least one request in the session, or close it with the outcome INFRA_FAILED")
	ErrSessionGroup = rpcerr.New(codes.FailedPrecondition, ReasonNoGroup, "the session belongs to no prompt group").
			Fix("take sessions from NextPrompts (POST /v1/rollout/prompts), or set sampling.group_size = 1 with an algorithm that compares no groups")
	ErrRunAway = rpcerr.New(codes.Unavailable, ReasonRunAway, "the run takes no sample now").RetryAfter(time.Second).
			Fix("close the session again, or leave it: its end is recorded and reaches the run when it continues")
	ErrNotExternal = rpcerr.New(codes.FailedPrecondition, ReasonNotExternal, "the run samples by itself").
			Fix("set environment.kind = \"external\" in the configuration of the run")
	ErrSampling        = rpcerr.New(codes.InvalidArgument, ReasonSampling, "the run can't train on samples with these parameters")
	ErrSegmentConflict = rpcerr.New(codes.Aborted, ReasonSegment, "the session has a different segment with this id")
	ErrResponse        = rpcerr.New(codes.NotFound, ReasonResponse, "no stored response has this id")
)

// Segment is a segment of a session and the request that appended it.
type Segment = gatewayv1.SessionSegment

// Session is the segments of a session, parents first, with its task and its end.
type Session = gatewayv1.GetSessionResponse

// Task is one sample of a prompt group, which a session is issued for.
type Task = gatewayv1.SessionTask

// End is how a session ended.
type End = gatewayv1.SessionEnd

// Response is a stored response of the Responses API.
type Response = edge.StoredResponse

// Store is the database of the service. Several gateways may share one.
type Store interface {
	SessionStore
	ResponseStore
	KeyStore
}

// SessionStore keeps the ledger of sessions.
type SessionStore interface {
	// Append adds segments to a session, parents first, and creates the session for the run. first
	// is the number of segments that it had before. A segment that it has already is skipped.
	// Segments survive a crash of the process when it returns. ErrSessionRun if the session belongs
	// to another run; ErrSessionClosed if it is closed; ErrSegmentConflict if it has a different
	// segment with the same id; fence.ErrDeleted. Then nothing is added.
	Append(ctx context.Context, session, run string, segments []*Segment) (first int, err error)
	// Session returns the session with its segments from number from on. ErrSession.
	Session(ctx context.Context, session string, from int) (*Session, error)
	// Issue creates the sessions of a prompt group, which are due at their deadlines. If the group
	// has sessions already, they stay, and it returns their tasks. The sessions must be new.
	// fence.ErrDeleted.
	Issue(ctx context.Context, run string, tasks []*Task) ([]*Task, error)
	// Bind gives an open session without a task one. It returns the task that the session has.
	// ErrSession.
	Bind(ctx context.Context, task *Task) (*Task, error)
	// Finish ends a session, and returns it with its segments. If it is closed already, the earlier
	// end stays. It is then due at a time, until it is settled. ErrSession.
	Finish(ctx context.Context, session string, end *End, due time.Time) (*Session, error)
	// Settle replaces the end of a closed session by the final one. Nothing is due any more.
	Settle(ctx context.Context, session string, end *End) error
	// Unsettled counts the sessions of a prompt group that are open or not settled.
	Unsettled(ctx context.Context, group string) (int, error)
	// Due returns sessions that were due before a time, the oldest first, at most limit. Each is then
	// due at again, so that of several gateways one takes it.
	Due(ctx context.Context, before, again time.Time, limit int) ([]string, error)
	// Expire deletes the sessions whose newest segment is older than before with their responses, and
	// returns how many sessions.
	Expire(ctx context.Context, before time.Time) (sessions int, err error)
	// DeleteRun deletes the sessions of a run with their responses, in transactions of bounded size.
	// From then on the run gets no sessions. fence.ErrFenced if a former leader has decided it.
	DeleteRun(ctx context.Context, run string, by *fencev1.Fence) error
}

// ResponseStore keeps responses until their session expires.
type ResponseStore interface {
	// KeepResponse stores a response. It is durable on return.
	KeepResponse(ctx context.Context, r *Response) error
	// Response returns a response. ErrResponse.
	Response(ctx context.Context, id string) (*Response, error)
	// DeleteResponse deletes a response. ErrResponse.
	DeleteResponse(ctx context.Context, id string) error
}

// KeyStore keeps the hashes of API keys.
type KeyStore interface {
	// AddKeys stores the keys whose names and hashes are new, and returns how many.
	AddKeys(ctx context.Context, keys []*apikey.Record) (added int, err error)
	// RemoveKey deletes a key, and reports whether it was there.
	RemoveKey(ctx context.Context, name string) (removed bool, err error)
	// ListKeys returns keys in the order of their names, from the first one after a name on.
	ListKeys(ctx context.Context, after string, limit int) ([]*apikey.Record, error)
	// Keys returns all keys if their revision is not the known one. Each change of a key makes a new
	// revision; without any change it is 0.
	Keys(ctx context.Context, known int64) (revision int64, keys []*apikey.Record, err error)
	// UseKeys records when keys were used. Earlier times than the stored ones are ignored.
	UseKeys(ctx context.Context, used []*keyv1.ApiKeyUse) error
	// ExpireKeys deletes the keys that expired before a time, and returns how many.
	ExpireKeys(ctx context.Context, before time.Time) (removed int, err error)
}

// NoSession is the ErrSession about an id, and the answer about a session of another project: a
// caller cannot tell which.
func NoSession(id string) error { return ErrSession.With("session", id) }

// NoResponse is the ErrResponse about an id, and about a response of another project.
func NoResponse(id string) error { return ErrResponse.With("response", id) }
