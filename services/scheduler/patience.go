package scheduler

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// insist repeats a call while it fails in a way that may pass, and shows what is waited for.
func (c *conductor) insist(ctx context.Context, what string, call func(context.Context) error) error {
	delay := 50 * time.Millisecond
	told := false
	for {
		patient := c.noticeSlow(what)
		err := call(ctx)
		patient()
		if err == nil || ctx.Err() != nil || !transient(err) {
			c.waitFor(what, "")
			return err
		}
		c.waitFor(what, rpcerr.Text(err))
		if rpcerr.Code(err) == codes.ResourceExhausted && !told { // somebody has to make room
			c.svc.Log.WarnContext(ctx, "the run waits for room", "run", c.id, "for", what, "reason", rpcerr.Reason(err), "fix", rpcerr.Fix(err))
			told = true
		}
		c.svc.Log.DebugContext(ctx, "waiting", "run", c.id, "for", what, "error", err)
		if err := pause(ctx, delay); err != nil {
			return err
		}
		delay = min(2*delay, 2*time.Second)
	}
}

// noticeSlow shows what is waited for when a call has not returned after two seconds; the returned function ends that.
func (c *conductor) noticeSlow(what string) func() {
	var mu sync.Mutex
	returned := false
	timer := time.AfterFunc(2*time.Second, func() {
		mu.Lock()
		defer mu.Unlock()
		if !returned {
			c.waitFor(what, "no answer yet")
		}
	})
	return func() {
		timer.Stop()
		mu.Lock()
		defer mu.Unlock()
		returned = true
	}
}

// follow repeats a call that reads a stream, however the stream ends, until ctx ends or the call fails for good.
func (c *conductor) follow(ctx context.Context, what string, call func(context.Context) error) error {
	for {
		err := endOfStream(call(ctx))
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			if !transient(err) {
				return err
			}
			c.waitFor(what, rpcerr.Text(err))
		}
		if err := pause(ctx, 200*time.Millisecond); err != nil {
			return nil
		}
	}
}

// pause waits, at most until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
