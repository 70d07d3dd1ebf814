// Package retry repeats calls to other services that may succeed later, and shows what is waited
// for.
package retry

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/telemetry"
)

// slow is how long a call may take before it counts as a wait.
const slow = 2 * time.Second

// Awaited is what a run waits for. Owner: the service or dependency whose answer ends the wait;
// Also: another one that it may be; empty: none. What: for people, with the owner in parentheses.
type Awaited struct {
	Owner, Also, What string
}

// Retrier repeats the calls of one run. Safe for concurrent use.
type Retrier struct {
	run  string
	show func(what Awaited, why error)
	log  *slog.Logger
}

// errSlow is why a run waits for a call that has not returned.
var errSlow = errors.New("no answer yet")

// New makes a Retrier. show is called with what the run waits for and why; a nil error ends that
// wait.
func New(run string, show func(what Awaited, why error), log *slog.Logger) Retrier {
	return Retrier{run: run, show: show, log: log}
}

// Until repeats a call with backoff while it fails with a transient error. It returns nil, the
// permanent error, or the error of ctx.
func (r Retrier) Until(ctx context.Context, what Awaited, call func(context.Context) error) error {
	delay := 50 * time.Millisecond
	warned := false
	for {
		returned := r.showSlow(what)
		err := call(ctx)
		returned()
		if err == nil || ctx.Err() != nil || !Transient(err) {
			r.show(what, nil)
			return err
		}
		r.show(what, err)
		if rpcerr.Code(err) == codes.ResourceExhausted && !warned { // an operator has to free space
			r.log.WarnContext(ctx, "the run waits for space", telemetry.AttrRun, r.run, "for", what.What, "reason", rpcerr.Reason(err), "fix", rpcerr.Fix(err))
			warned = true
		}
		r.log.DebugContext(ctx, "waiting", telemetry.AttrRun, r.run, "for", what.What, "error", err)
		if err := Sleep(ctx, delay); err != nil {
			return err
		}
		delay = min(2*delay, 2*time.Second)
	}
}

// Follow repeats a call that reads a stream until ctx ends (nil) or the call fails with a permanent
// error.
func (r Retrier) Follow(ctx context.Context, what Awaited, call func(context.Context) error) error {
	for {
		err := EndOfStream(call(ctx))
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			if !Transient(err) {
				return err
			}
			r.show(what, err)
		}
		if err := Sleep(ctx, 200*time.Millisecond); err != nil {
			return nil
		}
	}
}

// showSlow shows a wait if the call has not returned in time. The caller calls the returned
// function when it has.
func (r Retrier) showSlow(what Awaited) func() {
	var mu sync.Mutex
	returned := false
	timer := time.AfterFunc(slow, func() {
		mu.Lock()
		defer mu.Unlock()
		if !returned {
			r.show(what, errSlow)
		}
	})
	return func() {
		timer.Stop()
		mu.Lock()
		defer mu.Unlock()
		returned = true
	}
}

// Sleep waits for d, or returns the error of ctx.
func Sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// Transient reports whether a call may succeed when it is repeated.
func Transient(err error) bool {
	switch rpcerr.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted, codes.Canceled:
		return true
	}
	return false
}

// EndOfStream returns nil for io.EOF, with which a stream ends regularly.
func EndOfStream(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
