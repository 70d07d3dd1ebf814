package ledger

import (
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Errors that callers branch on.
var (
	ErrNoLedger   = rpcerr.New(codes.NotFound, "LEDGER_NOT_FOUND", "the run has no ledger: call OpenLedger first")
	ErrConfig     = rpcerr.New(codes.FailedPrecondition, "LEDGER_CONFIG_CONFLICT", "the run's ledger was opened with another config")
	ErrClosed     = rpcerr.New(codes.FailedPrecondition, "LEDGER_CLOSED", "the run's ledger is closed: OpenLedger opens it again")
	ErrRange      = rpcerr.New(codes.InvalidArgument, "GROUP_OUT_OF_RANGE", "the group is outside the run's positions")
	ErrGroupState = rpcerr.New(codes.FailedPrecondition, "GROUP_STATE_CONFLICT", "the group's state does not allow this")
	ErrAttempt    = rpcerr.New(codes.FailedPrecondition, "GROUP_ATTEMPT_CONFLICT",
		"the group is on a later attempt: list the groups and decide again")
	ErrDigest    = rpcerr.New(codes.FailedPrecondition, "WEIGHTS_DIGEST_CONFLICT", "the version is recorded with another digest")
	ErrOrder     = rpcerr.New(codes.FailedPrecondition, "STEP_OUT_OF_ORDER", "only the step after the last committed one can be leased")
	ErrStep      = rpcerr.New(codes.FailedPrecondition, "STEP_CONFLICT", "the step was recorded with another batch or digest")
	ErrLease     = rpcerr.New(codes.FailedPrecondition, "STEP_NOT_LEASED", "the step has no leased batch: call LeaseBatch first")
	ErrNoBatch   = rpcerr.New(codes.NotFound, "BATCH_NOT_FOUND", "the step has no batch: it was not leased in this run")
	ErrExhausted = rpcerr.New(codes.FailedPrecondition, "DYNAMIC_SAMPLING_EXHAUSTED",
		"too few of the groups that a step may draw have rewards that differ").
		Fix("give partial credit in the reward, use prompts that the policy solves sometimes, raise `group_size` or `refill_rounds` in " +
			"[sampling], or set `refill_shortfall = \"train\"`; then start from the last snapshot: `rollout run --config FILE --from RUN --continue`")
)
