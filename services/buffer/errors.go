package buffer

import (
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Errors that callers branch on, besides those of the packages ledger and ingest.
var (
	ErrRun     = rpcerr.New(codes.InvalidArgument, "RUN_ID_INVALID", "a run id may contain only letters, digits, - and _")
	ErrTrimmed = rpcerr.New(codes.FailedPrecondition, "PAYLOADS_TRIMMED",
		"the step's payloads were deleted after a snapshot covered it: start from that snapshot")
	ErrLost = rpcerr.New(codes.DataLoss, "PAYLOAD_LOST",
		"a payload differs from what was written: the segment was damaged or changed; start from a snapshot")
	ErrLeaving     = rpcerr.New(codes.Unavailable, "BUFFER_LEAVING", "the buffer is shutting down: try again").RetryAfter(200 * time.Millisecond)
	ErrNoArtifacts = rpcerr.New(codes.Unavailable, "ARTIFACTS_UNAVAILABLE",
		"the payload is in the storage service, which cannot be reached from this process")
)
