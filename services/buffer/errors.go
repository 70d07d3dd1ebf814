package buffer

import (
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Errors that callers branch on.
var (
	ErrNoLedger   = rpcerr.New(codes.NotFound, "LEDGER_NOT_FOUND", "the run has no ledger: OpenLedger makes it")
	ErrRun        = rpcerr.New(codes.InvalidArgument, "RUN_ID_INVALID", "a run id has letters, digits, - and _ alone")
	ErrConfig     = rpcerr.New(codes.FailedPrecondition, "LEDGER_CONFIG_CONFLICT", "the run's ledger was opened with another config")
	ErrRange      = rpcerr.New(codes.InvalidArgument, "GROUP_OUT_OF_RANGE", "the group is outside the run's positions")
	ErrGroupState = rpcerr.New(codes.FailedPrecondition, "GROUP_STATE_CONFLICT",
		"the group's state does not allow this")
	ErrAttempt = rpcerr.New(codes.FailedPrecondition, "GROUP_ATTEMPT_CONFLICT", "the group is on a later attempt: list groups and decide again")
	ErrDigest  = rpcerr.New(codes.FailedPrecondition, "WEIGHTS_DIGEST_CONFLICT", "the version is recorded with another digest")
	ErrOrder   = rpcerr.New(codes.FailedPrecondition, "STEP_OUT_OF_ORDER", "only the step after the last committed one can be leased")
	ErrStep    = rpcerr.New(codes.FailedPrecondition, "STEP_CONFLICT", "the step was recorded with another batch or digest")
	ErrLease   = rpcerr.New(codes.FailedPrecondition, "STEP_NOT_LEASED", "the step has no leased batch: LeaseBatch first")
	ErrNoBatch = rpcerr.New(codes.NotFound, "BATCH_NOT_FOUND", "the step has no batch: it was not leased in this run")
	ErrTrimmed = rpcerr.New(codes.FailedPrecondition, "PAYLOADS_TRIMMED",
		"the step's payloads were dropped when a snapshot covered it: start from that snapshot")
	ErrLost = rpcerr.New(codes.DataLoss, "PAYLOAD_LOST",
		"a payload is not what was written: the disk or somebody changed the segment; go on from a snapshot")
	ErrStale = rpcerr.New(codes.FailedPrecondition, "STALE_INCARNATION",
		"the run was begun again since: whoever asks conducts an older incarnation of it, and must leave it alone")
	ErrClosed    = rpcerr.New(codes.FailedPrecondition, "LEDGER_CLOSED", "the run's ledger is closed: OpenLedger opens it again")
	ErrLeaving   = rpcerr.New(codes.Unavailable, "BUFFER_LEAVING", "the buffer is about to end: try again").RetryAfter(200 * time.Millisecond)
	ErrIngest    = rpcerr.New(codes.Unavailable, "INGEST_FAILED", "the samples could not be made durable: put them again").RetryAfter(500 * time.Millisecond)
	ErrDiskFull  = rpcerr.New(codes.ResourceExhausted, ReasonDiskFull, "no samples are taken: the disk of the segments is full").RetryAfter(time.Second)
	ErrExhausted = rpcerr.New(codes.FailedPrecondition, "DYNAMIC_SAMPLING_EXHAUSTED",
		"too few of the groups that a step may draw have rewards that differ").
		Fix("give partial credit in the reward, take prompts that the policy gets right now and then, raise `group_size` or `refill_rounds` in " +
			"[sampling], or write `refill_shortfall = \"train\"`; then start from the last snapshot: `rollout run --config FILE --from RUN`")
	ErrNoArtifacts = rpcerr.New(codes.Unavailable, "ARTIFACTS_UNAVAILABLE", "the payload is in the storage service, which is not reachable from here")
)
