package ingest

import (
	"errors"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
)

// ReasonDiskFull means that nothing is ingested, because the disk of the segments has only its
// reserve left.
const ReasonDiskFull = "DISK_FULL"

// Errors that callers branch on.
var (
	ErrFailed = rpcerr.New(codes.Unavailable, "INGEST_FAILED", "the samples could not be made durable: put them again").
			RetryAfter(500 * time.Millisecond)
	ErrDiskFull = rpcerr.New(codes.ResourceExhausted, ReasonDiskFull, "no samples are accepted: the disk of the segments is full").
			RetryAfter(time.Second)
)

func diskFull(run, why string) error {
	return ErrDiskFull.With("run", run).WithMessage("no samples are accepted: %s", why)
}

// outOfSpace reports whether a write failed for lack of space.
func outOfSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, sqldb.ErrFull)
}
