package lifecycle

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// recorder notes in which order components end.
type recorder struct {
	mu    sync.Mutex
	order []string
}

func (r *recorder) component(name string) (string, func(context.Context) error) {
	return name, func(ctx context.Context) error {
		<-ctx.Done()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.order = append(r.order, name)
		return nil
	}
}

func TestComponentsEndLastToFirst(t *testing.T) {
	t.Parallel()
	var r recorder
	var g Group
	g.Add(r.component("bus"))
	g.Add(r.component("buffer"))
	g.Add(r.component("scheduler"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := g.Run(ctx, t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(r.order, " "); got != "scheduler buffer bus" {
		t.Fatalf("ended in order %q", got)
	}
}

func TestFirstErrorDrainsTheRest(t *testing.T) {
	t.Parallel()
	var r recorder
	var g Group
	boom := errors.New("boom")
	g.Add(r.component("bus"))
	g.Add("bad", func(context.Context) error { return boom })
	g.Add(r.component("last"))
	err := g.Run(t.Context(), t.Context())
	if !errors.Is(err, boom) || !strings.HasPrefix(err.Error(), "bad: ") {
		t.Fatalf("got %v", err)
	}
	if len(r.order) != 2 {
		t.Fatalf("ended: %v", r.order)
	}
}

func TestPanicIsAnErrorOfItsComponent(t *testing.T) {
	t.Parallel()
	var g Group
	g.Add("bad", func(context.Context) error { panic("at the disco") })
	err := g.Run(t.Context(), t.Context())
	if err == nil || !strings.Contains(err.Error(), "bad: panic: at the disco") {
		t.Fatalf("got %v", err)
	}
}

func TestGraceEndsAStuckDrain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		g := Group{Grace: 5 * time.Second}
		g.Add("stuck", func(context.Context) error { <-release; return nil })
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		began := time.Now()
		err := g.Run(ctx, t.Context())
		close(release)
		if !errors.Is(err, ErrHardStop) || !strings.Contains(err.Error(), "stuck") {
			t.Errorf("got %v", err)
		}
		if d := time.Since(began); d != 5*time.Second {
			t.Errorf("took %v", d)
		}
	})
}

func TestSecondSignalStopsHard(t *testing.T) {
	t.Parallel()
	ch := make(chan os.Signal, 2)
	drain, hard, stop := watch(t.Context(), ch, func() {})
	defer stop()
	ch <- syscall.SIGTERM
	<-drain.Done()
	if hard.Err() != nil {
		t.Fatal("the first signal stopped hard")
	}
	var g Group
	release := make(chan struct{})
	defer close(release)
	g.Add("stuck", func(ctx context.Context) error { <-ctx.Done(); ch <- syscall.SIGTERM; <-release; return nil })
	if err := g.Run(drain, hard); !errors.Is(err, ErrHardStop) {
		t.Fatalf("got %v", err)
	}
}
