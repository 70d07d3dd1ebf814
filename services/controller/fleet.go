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
	"github.com/rollout-rl/rollout/libs/rpcerr"
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
	want    *weightsv1.WeightsManifest
	members map[string]*member // by process
	changed chan struct{}      // closed and replaced at each change
}

type member struct {
	worker string
	client inferencev1.InferenceWorkerServiceClient
	loaded *weightsv1.WeightsReceipt // nil before the first
	fenced bool
	cancel context.CancelFunc

	retries uint64 // of the reward that it told of last, since its start
}

func newFleet(run string, incarnation uint32, dial func(string) (Conn, error), retry time.Duration, fenced func(string, error)) *fleet {
	return &fleet{
		run: run, incarnation: incarnation, dial: dial, retry: retry, fenced: fenced,
		members: map[string]*member{}, changed: make(chan struct{}),
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
			m := &member{worker: in.Meta["worker"], client: inferencev1.NewInferenceWorkerServiceClient(conn), cancel: cancel}
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

// follow brings one member to the wanted weights, again and again.
func (f *fleet) follow(ctx context.Context, m *member) {
	pause := f.retry
	for ctx.Err() == nil {
		f.mu.Lock()
		want, changed := f.want, f.changed
		current := want == nil || m.holds(want)
		f.mu.Unlock()
		if current {
			select {
			case <-ctx.Done():
			case <-changed:
			}
			continue
		}
		loaded, err := m.client.LoadWeights(ctx, &inferencev1.LoadWeightsRequest{Weights: want})
		if err == nil && loaded.GetReceipt().GetDigest() != want.GetDigest() {
			err = fmt.Errorf("worker %s holds %s and was sent %s", m.worker, loaded.GetReceipt().GetDigest(), want.GetDigest())
		} else if err != nil && rpcerr.Reason(err) != "WEIGHTS_DIGEST_MISMATCH" {
			sleep(ctx, pause)
			pause = min(2*pause, 20*f.retry)
			continue
		}
		pause = f.retry
		f.mu.Lock()
		if err == nil {
			m.loaded = loaded.GetReceipt()
		}
		m.fenced = err != nil
		f.broadcast()
		f.mu.Unlock()
		if err != nil {
			f.fenced(m.worker, err)
			return
		}
	}
}

func (m *member) holds(w *weightsv1.WeightsManifest) bool {
	return m.loaded != nil && m.loaded.GetVersion() == w.GetVersion() && m.loaded.GetDigest() == w.GetDigest()
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
	f.broadcast()
}

// deliver makes w the wanted weights and returns how many workers hold them when each that is registered and not fenced
// does. With no worker there it returns at once: those to come will load w before they are asked for anything.
func (f *fleet) deliver(ctx context.Context, w *weightsv1.WeightsManifest, waiting func(who string)) (int, error) {
	f.aim(w)
	for {
		holding, behind, changed := f.count(w)
		if len(behind) == 0 {
			return holding, nil
		}
		waiting(strings.Join(behind, ", "))
		select {
		case <-ctx.Done():
			return holding, ctx.Err()
		case <-changed:
		}
	}
}

func (f *fleet) count(w *weightsv1.WeightsManifest) (holding int, behind []string, changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.members {
		switch {
		case m.fenced:
		case m.holds(w):
			holding++
		default:
			behind = append(behind, m.worker)
		}
	}
	return holding, behind, f.changed
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
