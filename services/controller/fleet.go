package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/discovery"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// fleet is the inference workers of a run. Each member is brought to the wanted weights by a goroutine of its own, so
// that one that joins late catches up without anybody's help, and a slow one holds up nobody's bookkeeping.
type fleet struct {
	run         string
	incarnation uint32
	dial        func(address string) (Conn, error)
	retry       time.Duration
	fenced      func(worker string, err error) // told of a worker that can't verify its weights

	mu      sync.Mutex
	offers  offers
	want    *weightsv1.WeightsManifest
	aimed   chan struct{}      // closed and replaced when want is
	members map[string]*member // by process
	changed chan struct{}      // closed and replaced at each change
}

func newFleet(run string, incarnation uint32, dial func(string) (Conn, error), retry time.Duration, fenced func(string, error)) *fleet {
	return &fleet{
		run: run, incarnation: incarnation, dial: dial, retry: retry, fenced: fenced,
		members: map[string]*member{}, aimed: make(chan struct{}), changed: make(chan struct{}),
	}
}

// serve follows the registry until ctx ends, then waits for its members' goroutines.
func (f *fleet) serve(ctx context.Context, instances <-chan []discovery.Instance) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for list := range instances {
		f.mu.Lock()
		gone := f.members
		f.members = map[string]*member{}
		for _, in := range list {
			if !ours(in, f.run, f.incarnation) {
				continue
			}
			key := in.Address + "/" + in.Meta["process"]
			if m, ok := gone[key]; ok {
				f.members[key] = m
				delete(gone, key)
				continue
			}
			conn, err := f.dial(in.Address)
			if err != nil {
				continue // a malformed address; the registry's next change brings another
			}
			life, cancel := context.WithCancel(ctx)
			m := &member{worker: in.Meta["worker"], address: in.Address, client: inferencev1.NewInferenceWorkerServiceClient(conn), cancel: cancel}
			f.members[key] = m
			wg.Go(func() {
				defer func() { _ = conn.Close() }()
				f.follow(life, m)
			})
		}
		for _, m := range gone {
			m.cancel()
		}
		f.broadcast()
		f.mu.Unlock()
	}
}

// from makes l the learner that offers weights; nil: there is none.
func (f *fleet) from(l *learner) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.offers.learner, f.offers.address = nil, ""
	if l != nil {
		f.offers.learner, f.offers.address = l.client, l.address
	}
}

// broadcast wakes everybody who waits for a change. The caller holds the lock.
func (f *fleet) broadcast() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// aim makes w the wanted weights and waits for nobody.
func (f *fleet) aim(w *weightsv1.WeightsManifest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.want = w
	close(f.aimed)
	f.aimed = make(chan struct{})
	f.broadcast()
}

// deliver makes w the wanted weights and returns how many workers hold them when each that is registered and not fenced
// does. With no worker there it returns at once: those to come will load w before they are asked for anything. errNowhere where one
// can have w from nobody.
func (f *fleet) deliver(ctx context.Context, w *weightsv1.WeightsManifest, waiting func(who, hindered string)) (int, error) {
	f.aim(w)
	for {
		now, changed := f.count(w)
		switch {
		case len(now.behind) == 0:
			return now.holding, nil
		case now.nowhere:
			return now.holding, fmt.Errorf("%w%s", errNowhere, now.hindered)
		}
		waiting(nameSome(now.behind), now.hindered)
		select {
		case <-ctx.Done():
			return now.holding, ctx.Err()
		case <-changed:
		}
	}
}

// mostNamed is how many workers a sentence names.
const mostNamed = 4

// nameSome lists the first workers and counts the rest.
func nameSome(workers []string) string {
	if len(workers) <= mostNamed {
		return strings.Join(workers, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(workers[:mostNamed-1], ", "), len(workers)-mostNamed+1)
}

// standing is how far a fleet is with the wanted weights.
type standing struct {
	holding  int
	behind   []string // who does not hold them yet
	hindered string   // why, of one of those
	nowhere  bool     // one of those can have them from nobody
}

// count returns a channel too that is closed at the next change.
func (f *fleet) count(w *weightsv1.WeightsManifest) (now standing, changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		switch {
		case m.fenced:
		case m.holds(w):
			now.holding++
		default:
			now.behind = append(now.behind, m.worker)
			now.nowhere = now.nowhere || m.nowhere == f.aimed
			if m.refusal != "" {
				now.hindered = fmt.Sprintf(" (%s: %s)", m.worker, m.refusal)
			}
		}
	}
	return now, f.changed
}

// lost is errNowhere where nobody holds w and a worker found nobody to have it from: the last that had it are no more.
func (f *fleet) lost(w *weightsv1.WeightsManifest) error {
	if now, _ := f.count(w); now.holding == 0 && now.nowhere {
		return fmt.Errorf("%w%s", errNowhere, now.hindered)
	}
	return nil
}

// holder returns a worker that holds w, other than those in tried; nil where there is none, and a channel that is
// closed at the next change.
func (f *fleet) holder(w *weightsv1.WeightsManifest, tried map[*member]bool) (*member, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		if !m.fenced && m.holds(w) && !tried[m] {
			return m, f.changed
		}
	}
	return nil, f.changed
}

// statusPatience is how long a worker may take to say how it is.
const statusPatience = 500 * time.Millisecond

// rewardRetries asks the workers how many calls of the reward they repeated since they were asked last. Who does not answer in a
// moment counts next time.
func (f *fleet) rewardRetries(ctx context.Context) (repeated uint64) {
	ctx, cancel := context.WithTimeout(ctx, statusPatience)
	defer cancel()
	f.mu.Lock()
	members := slices.Collect(maps.Values(f.members))
	f.mu.Unlock()
	var wg sync.WaitGroup
	for _, m := range members {
		wg.Go(func() {
			status, err := m.client.GetInferenceStatus(ctx, &inferencev1.GetInferenceStatusRequest{})
			f.mu.Lock()
			defer f.mu.Unlock()
			if now := status.GetRewardRetries(); err == nil && now > m.retries {
				repeated += now - m.retries
				m.retries = now
			}
		})
	}
	wg.Wait()
	return repeated
}

// ours reports whether a worker belongs to this incarnation of the run.
func ours(in discovery.Instance, run string, incarnation uint32) bool {
	return in.Meta["run"] == run && in.Meta["incarnation"] == strconv.FormatUint(uint64(incarnation), 10)
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
