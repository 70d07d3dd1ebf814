package lifecycle

import (
	"context"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
)

// Signals returns two contexts: drain ends at the first SIGINT or SIGTERM, hard at the second.
// SIGHUP is ignored, so that a daemon outlives the terminal that started it. stop releases the
// handlers.
func Signals(parent context.Context) (drain, hard context.Context, stop func()) {
	signal.Ignore(syscall.SIGHUP)
	ch := make(chan os.Signal, 2)
	signal.Notify(ch, syscall.SIGINT, syscall.SIGTERM)
	return watch(parent, ch, func() { signal.Stop(ch) })
}

func watch(parent context.Context, ch <-chan os.Signal, release func()) (drain, hard context.Context, stop func()) {
	drain, cancelDrain := context.WithCancel(parent)
	hard, cancelHard := context.WithCancel(context.WithoutCancel(parent))
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for _, cancel := range []context.CancelFunc{cancelDrain, cancelHard} {
			select {
			case <-ch:
				cancel()
			case <-quit:
				return
			}
		}
	}()
	return drain, hard, func() {
		close(quit)
		<-done
		release()
		cancelDrain()
		cancelHard()
	}
}

func stack() []byte { return debug.Stack() }
