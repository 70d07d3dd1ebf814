package ingest

import (
	"errors"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
)

// ErrFailed reports that samples were not ingested, for a cause that a retry may fix.
var ErrFailed = rpcerr.New(codes.Unavailable, "INGEST_FAILED", "the samples could not be made durable: put them again").
	RetryAfter(500 * time.Millisecond)

func diskFull(run, why string) error {
	return rpcerr.ErrDiskFull.With("run", run).WithMessage("no samples are accepted: %s", why)
}

// outOfSpace reports whether a write failed for lack of space.
func outOfSpace(err error) bool { return rpcerr.DiskFull(err) || errors.Is(err, sqldb.ErrFull) }
