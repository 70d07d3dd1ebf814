package controller

import (
	"cmp"
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/wait"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// retries is how calls to services are repeated.
type retries struct {
	first    time.Duration // pause before the first repetition
	progress *progress     // shows the service that does not answer
	room     *room         // for a service whose disk is full
}

// call calls a service and repeats the call while the service does not answer, or has a full disk.
// errNoRoom if the drive is asked to stop in the meantime.
func call[Req, Resp any](ctx context.Context, r retries, name string, rpc func(context.Context, *Req, ...grpc.CallOption) (*Resp, error), req *Req) (*Resp, error) {
	pause, full := newBackoff(r.first), newBackoff(r.room.pause)
	for {
		out, err := rpc(ctx, req)
		if err == nil || ctx.Err() != nil || !transient(err) {
			r.progress.stall("")
			r.progress.answered(name)
			return out, err
		}
		if rpcerr.DiskFull(err) {
			if err := r.room.rest(ctx, rpcerr.Text(err), full.next()); err != nil {
				return out, err
			}
			continue
		}
		r.progress.waitFor(&waitv1.Wait{
			Owner: name, Reason: wait.NoAnswer, Subjects: []string{name}, Evidence: name + " to answer: " + rpcerr.Text(err),
			Fix: cmp.Or(rpcerr.Fix(err), "check that the service runs (`rollout status`, `rollout doctor`); the run then continues"),
		})
		sleep(ctx, pause.next())
	}
}

// transient reports whether a repeated call may succeed. Canceled counts: the connection was closed
// if the caller's own context still lives.
func transient(err error) bool {
	switch rpcerr.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Aborted, codes.ResourceExhausted, codes.Canceled:
		return true
	}
	return false
}

// backoff is a pause that doubles up to 20 times the first.
type backoff struct{ first, pause time.Duration }

func newBackoff(first time.Duration) *backoff { return &backoff{first: first, pause: first} }

func (b *backoff) next() time.Duration {
	pause := b.pause
	b.pause = min(2*b.pause, 20*b.first)
	return pause
}

func (b *backoff) reset() { b.pause = b.first }

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
