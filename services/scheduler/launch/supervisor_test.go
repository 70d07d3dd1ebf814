package launch_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// fake is a launcher whose processes live as long as the test sets.
type fake struct {
	lives  []life // one per start; the last one repeats
	starts []time.Time
	stops  []time.Duration
	failed error
	queue  []time.Duration // that a process of each start waits before it begins; missing: it begins at once
}

type life struct {
	lasts     time.Duration // 0: until it is stopped
	registers bool
	vanishes  time.Duration // from the registry, this long after its start; 0: never
	exit      launch.Exit
}

type process struct {
	start int
	life  life
	done  chan struct{}
	fake  *fake
}

func (f *fake) life(start int) life { return f.lives[min(start, len(f.lives)-1)] }

// of is the life of the process with an id.
func (f *fake) of(id string) life {
	start, _ := strconv.Atoi(id)
	return f.life(start - 1)
}

func (f *fake) Launch(launch.Command) (launch.Process, error) {
	f.starts = append(f.starts, time.Now())
	if f.failed != nil {
		return nil, f.failed
	}
	p := &process{start: len(f.starts), life: f.life(len(f.starts) - 1), done: make(chan struct{}), fake: f}
	if len(f.queue) >= p.start {
		q := &queued{process: p, began: make(chan struct{}), awaits: make(chan launch.Awaited, 1)}
		q.awaits <- launch.Awaited{What: "place"}
		time.AfterFunc(f.queue[p.start-1], func() { close(q.began) })
		return q, nil
	}
	if p.life.lasts > 0 {
		time.AfterFunc(p.life.lasts, func() { close(p.done) })
	}
	return p, nil
}

func (p *process) ID() string            { return fmt.Sprint(p.start) }
func (p *process) Done() <-chan struct{} { return p.done }
func (p *process) Exit() launch.Exit     { return p.life.exit }
func (p *process) Stop(grace time.Duration) {
	p.fake.stops = append(p.fake.stops, grace)
	close(p.done)
}

// queued is a process that begins later.
type queued struct {
	*process
	began  chan struct{}
	awaits chan launch.Awaited
}

func (q *queued) Began() <-chan struct{}        { return q.began }
func (q *queued) Awaits() <-chan launch.Awaited { return q.awaits }

type observer struct{ seen []string }

func (o *observer) Started(worker string, p launch.Process, restarts int) {
	o.seen = append(o.seen, fmt.Sprintf("start %s after %d", p.ID(), restarts))
}

func (o *observer) Queued(worker string, p launch.Process, what launch.Awaited) {
	o.seen = append(o.seen, "waits for "+what.What)
}

func (o *observer) Exited(worker string, p launch.Process, exit launch.Exit, why string) {
	o.seen = append(o.seen, why)
}

func supervisor(f *fake, o *observer, l launch.Limits) *launch.Supervisor {
	return &launch.Supervisor{
		Worker: "learner-0", Launcher: f, Limits: l, Observer: o,
		Prepare: func(context.Context) (launch.Command, error) { return launch.Command{}, nil },
		Registered: func(ctx context.Context, id string) error {
			if f.of(id).registers {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		},
		Absent: func(ctx context.Context, id string, timeout time.Duration) error {
			gone := f.of(id).vanishes
			if gone == 0 {
				<-ctx.Done()
				return ctx.Err()
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(gone + timeout):
				return nil
			}
		},
	}
}

// A process that hangs while it exits is stopped, so that another one can replace it.
func TestProcessThatLeftTheRegistryAndHangsIsReplaced(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{lives: []life{{registers: true, vanishes: time.Minute}, {registers: true}}}
		o := &observer{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := supervisor(f, o, launch.Limits{Restarts: 3}).Run(ctx); err != nil {
			t.Fatal(err)
		}
		want := []string{"start 1 after 0", "left the registry and was still running 30s later", "start 2 after 1"}
		if !slices.Equal(o.seen, want) || f.stops[0] != time.Second || f.starts[1].Sub(f.starts[0]) != 90*time.Second+100*time.Millisecond {
			t.Fatalf("seen %q, stops %v, starts %v", o.seen, f.stops, f.starts)
		}
	})
}

func TestCrashLoopEndsAfterTheLastAllowedRestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{lives: []life{{lasts: time.Millisecond, exit: launch.Exit{Code: 7, LastLines: []string{"first", "no such model"}}}}}
		o := &observer{}
		begin := time.Now()
		err := supervisor(f, o, launch.Limits{Restarts: 3}).Run(t.Context())
		var loop *launch.CrashLoop
		if !errors.As(err, &loop) || loop.Restarts != 4 || len(f.starts) != 4 || loop.Worker != "learner-0" {
			t.Fatalf("%v after %d starts", err, len(f.starts))
		}
		if !strings.Contains(err.Error(), "exited with code 7") || !strings.Contains(err.Error(), "\n  no such model") {
			t.Errorf("message %q", err)
		}
		// 100, 200 and 400 ms between the starts, 1 ms of life each.
		if took := time.Since(begin); took != 704*time.Millisecond {
			t.Errorf("took %v", took)
		}
		if want := []string{"start 1 after 0", "exited with code 7"}; !slices.Equal(o.seen[:2], want) || len(o.seen) != 8 {
			t.Errorf("seen %q", o.seen)
		}
	})
}

// A restart of a worker whose input cannot work would end the same way.
func TestWorkerThatRefusesItsInputIsNotRestarted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{lives: []life{{lasts: time.Millisecond, exit: launch.Exit{Code: launch.RefusedCode, LastLines: []string{"no tensor a.weight"}}}}}
		err := supervisor(f, &observer{}, launch.Limits{Restarts: 3}).Run(t.Context())
		const want = "learner-0 cannot work with its input (exit code 78); its last lines:\n  no tensor a.weight"
		if err == nil || err.Error() != want || len(f.starts) != 1 {
			t.Errorf("%v after %d starts", err, len(f.starts))
		}
	})
}

// Crashes further apart than the window are not a loop, and the backoff starts from the first value
// again.
func TestOldCrashesDoNotCount(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{lives: []life{{lasts: 11 * time.Minute, registers: true, exit: launch.Exit{Code: launch.FencedCode}}}}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Hour)
		defer cancel()
		if err := supervisor(f, &observer{}, launch.Limits{Restarts: 1, StartTimeout: time.Minute}).Run(ctx); err != nil {
			t.Fatal(err)
		}
		if len(f.starts) != 17 || f.starts[2].Sub(f.starts[1]) != 11*time.Minute+100*time.Millisecond {
			t.Fatalf("%d starts, %v apart", len(f.starts), f.starts[2].Sub(f.starts[1]))
		}
	})
}

func TestWorkerThatDoesNotRegisterIsStopped(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{lives: []life{{}}}
		o := &observer{}
		begin := time.Now()
		err := supervisor(f, o, launch.Limits{Restarts: 0, StartTimeout: 300 * time.Second}).Run(t.Context())
		var loop *launch.CrashLoop
		if !errors.As(err, &loop) || time.Since(begin) != 300*time.Second || len(f.stops) != 1 {
			t.Fatalf("%v after %v, %d stops", err, time.Since(begin), len(f.stops))
		}
		if !strings.Contains(err.Error(), "limits.worker_start_seconds") {
			t.Errorf("message %q", err)
		}
	})
}

func TestStopDrainsAndIsNotACrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{lives: []life{{registers: true}}}
		o := &observer{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := supervisor(f, o, launch.Limits{StopGrace: 7 * time.Second}).Run(ctx); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(f.stops, []time.Duration{7 * time.Second}) || len(o.seen) != 1 {
			t.Fatalf("stops %v, seen %q", f.stops, o.seen)
		}
	})
}

func TestWorkerThatHasNotRegisteredIsStoppedQuickly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{lives: []life{{}}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := supervisor(f, &observer{}, launch.Limits{}).Run(ctx); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(f.stops, []time.Duration{time.Second}) {
			t.Fatalf("stops %v", f.stops)
		}
	})
}

func TestCommandThatCanNotBeStartedIsACrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{failed: errors.New("no such file")}
		err := supervisor(f, &observer{}, launch.Limits{Restarts: 1}).Run(t.Context())
		var loop *launch.CrashLoop
		if !errors.As(err, &loop) || !strings.Contains(err.Error(), "could not be started: no such file") {
			t.Fatalf("got %v", err)
		}
	})
}

func TestBackoffIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{lives: []life{{lasts: time.Nanosecond}}}
		_ = supervisor(f, &observer{}, launch.Limits{Restarts: 12, MaxBackoff: 5 * time.Second}).Run(t.Context())
		last := f.starts[len(f.starts)-1].Sub(f.starts[len(f.starts)-2])
		if len(f.starts) != 13 || last.Round(time.Millisecond) != 5*time.Second {
			t.Fatalf("%d starts, the last %v apart", len(f.starts), last)
		}
	})
}

func TestAStalledWorkerSaysWhy(t *testing.T) {
	t.Parallel()
	lines := []string{"Thread 0x1:", "stalled: the engine computed no token for 300 s"}
	for _, c := range []struct {
		lines []string
		want  string
	}{
		{lines, "made no progress and stopped itself (exit code 4): the engine computed no token for 300 s"},
		{nil, "made no progress and stopped itself (exit code 4)"},
	} {
		if got := (launch.Exit{Code: launch.StalledCode, LastLines: c.lines}).String(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// The time limit of the start begins when a queued process has begun.
func TestAQueuedProcessHasNoTimeLimitUntilItBegins(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{lives: []life{{registers: true}}, queue: []time.Duration{3 * time.Hour}}
		o := &observer{}
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Hour)
		defer cancel()
		if err := supervisor(f, o, launch.Limits{StartTimeout: time.Minute}).Run(ctx); err != nil {
			t.Fatal(err)
		}
		if want := []string{"waits for place", "start 1 after 0"}; !slices.Equal(o.seen, want) || len(f.stops) != 1 {
			t.Errorf("seen %q, want %q; stops %v", o.seen, want, f.stops)
		}
	})
}

func TestAQueuedProcessIsStoppedWithItsSupervisor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{lives: []life{{}}, queue: []time.Duration{3 * time.Hour}}
		o := &observer{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		begin := time.Now()
		if err := supervisor(f, o, launch.Limits{}).Run(ctx); err != nil {
			t.Fatal(err)
		}
		if want := []string{"waits for place"}; !slices.Equal(o.seen, want) || len(f.stops) != 1 || time.Since(begin) != time.Hour {
			t.Errorf("seen %q, want %q; stops %v after %v", o.seen, want, f.stops, time.Since(begin))
		}
	})
}

// A worker whose operator withdraws it again and again is not a crash loop.
func TestAWorkerThatLeftIsNoCrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		left := life{lasts: time.Second, registers: true, exit: launch.Exit{Code: launch.RefusedCode, Left: "was withdrawn"}}
		f := &fake{lives: []life{left, left, left, {registers: true}}}
		o := &observer{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := supervisor(f, o, launch.Limits{Restarts: 0}).Run(ctx); err != nil {
			t.Fatal(err)
		}
		if len(f.starts) != 4 || o.seen[1] != "was withdrawn" {
			t.Errorf("%d starts, seen %q", len(f.starts), o.seen)
		}
	})
}
