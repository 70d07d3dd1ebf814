package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rollout-rl/rollout/cmd/internal/scripted"
)

// times are the latencies of some requests.
type times struct {
	first, token, whole []time.Duration
}

// percentiles are in microseconds.
type percentiles struct {
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
	P99 float64 `json:"p99"`
}

func of(sorted []time.Duration) percentiles {
	slices.Sort(sorted)
	at := func(share float64) float64 {
		if len(sorted) == 0 {
			return 0
		}
		return float64(sorted[min(len(sorted)-1, int(share*float64(len(sorted))))]) / float64(time.Microsecond)
	}
	return percentiles{at(0.50), at(0.95), at(0.99)}
}

// result is a measurement.
type result struct {
	First   percentiles        `json:"first"` // from the request to the first token
	Token   percentiles        `json:"token"` // from the policy to the client, of each token after the first
	Whole   percentiles        `json:"whole"` // from the request to the end
	Tokens  int                `json:"tokens"`
	Seconds float64            `json:"seconds"`
	CPU     map[string]float64 `json:"cpu"`  // seconds by process
	Load    float64            `json:"load"` // seconds of processor time of this process
}

// measure runs all streams, after one short request of each. Their starts are spread over the time
// of a completion.
func measure(ctx context.Context, p plan, c client, cpu map[string][]int) (*result, error) {
	name := strconv.FormatInt(time.Now().UnixNano(), 36)
	warm := p
	warm.tokens, warm.requests, warm.pace = 2, 1, min(p.pace, 5*time.Millisecond)
	var warmer client
	if w, ok := c.(*web); ok {
		warmer = &web{plan: warm, client: w.client}
	} else {
		warmer = &direct{plan: warm, worker: c.(*direct).worker}
	}
	if _, err := all(ctx, warm, warmer, name+"-warm"); err != nil {
		return nil, err
	}
	before, own, began := processor(cpu), clock(0), time.Now()
	t, err := all(ctx, p, c, name)
	if err != nil {
		return nil, err
	}
	out := &result{First: of(t.first), Token: of(t.token), Whole: of(t.whole), Tokens: len(t.token) + len(t.first), Seconds: time.Since(began).Seconds()}
	out.Load, out.CPU = clock(0)-own, processor(cpu)
	for name := range out.CPU {
		out.CPU[name] -= before[name]
	}
	return out, nil
}

// all runs the streams and returns their times.
func all(ctx context.Context, p plan, c client, name string) (*times, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	parts := make([]times, p.streams)
	for i := range p.streams {
		wg.Go(func() {
			select {
			case <-time.After(p.pace * time.Duration(p.tokens*i/p.streams)):
			case <-ctx.Done():
				return
			}
			if err := parts[i].stream(ctx, p, c, fmt.Sprintf("%s-%d", name, i)); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	sum := &times{}
	for _, part := range parts {
		sum.first, sum.token, sum.whole = append(sum.first, part.first...), append(sum.token, part.token...), append(sum.whole, part.whole...)
	}
	return sum, nil
}

// stream sends the requests of one client.
func (t *times) stream(ctx context.Context, p plan, c client, name string) error {
	var chat *conversation
	for n := range p.requests {
		if n%turns == 0 {
			chat = &conversation{id: fmt.Sprintf("%s-%d", name, n/turns)}
		}
		chat.ask(p)
		var said strings.Builder
		var broken error
		tokens, began := 0, time.Now()
		err := c.complete(ctx, chat, func(text []byte) {
			now := time.Now()
			said.Write(text)
			for ; len(text) > 0; text = text[scripted.Width:] {
				age, err := scripted.Age(text, now)
				if err != nil {
					broken = err
					return
				}
				if tokens++; tokens == 1 {
					t.first = append(t.first, now.Sub(began))
					continue
				}
				t.token = append(t.token, age)
			}
		})
		t.whole = append(t.whole, time.Since(began))
		if err == nil && broken == nil && tokens != p.tokens {
			err = fmt.Errorf("%d tokens arrived, expected %d", tokens, p.tokens)
		}
		if err := errors.Join(err, broken); err != nil {
			return err
		}
		chat.messages = append(chat.messages, message{"assistant", said.String()})
		chat.turn++
	}
	return nil
}

// disconnect closes requests after three tokens, one after another, and returns the times in
// nanoseconds since 1970.
func disconnect(ctx context.Context, p plan, c client, n int) (map[string][]int64, error) {
	var at []int64
	for i := range n {
		chat := &conversation{id: fmt.Sprintf("closed-%d-%d", time.Now().UnixNano(), i)}
		chat.ask(p)
		one, cancel := context.WithCancel(ctx)
		tokens := 0
		err := c.complete(one, chat, func([]byte) {
			if tokens++; tokens == 3 {
				at = append(at, time.Now().UnixNano())
				cancel()
			}
		})
		cancel()
		if err == nil {
			return nil, errors.New("the completion ended before it was closed")
		}
		if ctx.Err() != nil || len(at) != i+1 {
			return nil, err
		}
		<-time.After(300 * time.Millisecond) // the next one begins after this one was aborted
	}
	return map[string][]int64{"closed": at}, nil
}

// watch parses the processes whose processor time is measured.
func watch(text string) map[string][]int {
	found := map[string][]int{}
	for part := range strings.SplitSeq(text, ";") {
		name, list, _ := strings.Cut(part, "=")
		for id := range strings.SplitSeq(list, ",") {
			if pid, err := strconv.Atoi(id); err == nil {
				found[name] = append(found[name], pid)
			}
		}
	}
	return found
}

func processor(watched map[string][]int) map[string]float64 {
	out := map[string]float64{}
	for name, pids := range watched {
		for _, pid := range pids {
			out[name] += clock(pid)
		}
	}
	return out
}

// clock is the processor time of a process in seconds; 0: this process.
func clock(pid int) float64 {
	id := int32(unix.CLOCK_PROCESS_CPUTIME_ID)
	if pid > 0 {
		id = int32(^pid)<<3 | 2 // CPUCLOCK_SCHED of the process, as clock_getcpuclockid makes it
	}
	var t unix.Timespec
	if err := unix.ClockGettime(id, &t); err != nil {
		return 0
	}
	return float64(t.Sec) + float64(t.Nsec)/1e9
}
