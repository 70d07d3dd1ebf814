package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// fleet is the inference workers of a run. One goroutine per worker brings it to the wanted
// weights, so that a worker that joins late catches up by itself, and a slow worker does not delay
// the others.
type fleet struct {
	settings
	transfer transfer
	dial     func(address string) (Conn, error)
	retry    time.Duration
	fenced   func(worker string, err error) // called for a worker that can't verify its weights

	mu      sync.Mutex
	learner *learner // that offers weights; nil: none
	want    *weightsv1.WeightsManifest
	wanted  chan struct{}               // closed and replaced when want changes
	workers map[string]*inferenceWorker // by address and process
	changed chan struct{}               // closed and replaced at each change
}

func newFleet(s settings, dial func(string) (Conn, error), retry time.Duration, fenced func(string, error)) *fleet {
	return &fleet{
		settings: s, transfer: newTransfer(s), dial: dial, retry: retry, fenced: fenced,
		workers: map[string]*inferenceWorker{}, wanted: make(chan struct{}), changed: make(chan struct{}),
	}
}

// inferenceWorker is what the fleet knows of one worker. The fleet's lock guards it, except path.
type inferenceWorker struct {
	name     string
	address  string
	client   inferencev1.InferenceWorkerServiceClient
	cancel   context.CancelFunc
	path     path                      // only its own goroutine uses it
	loaded   *weightsv1.WeightsReceipt // nil before the first
	refusal  string                    // why it did not load the wanted weights at the last attempt
	noSource chan struct{}             // fleet.wanted at the time when no process had the weights for it; nil: never
	fenced   bool

	rewardRetries uint64 // the newest count it reported, since its start
}

func (w *inferenceWorker) has(m *weightsv1.WeightsManifest) bool {
	return w.loaded != nil && w.loaded.GetVersion() == m.GetVersion() && w.loaded.GetDigest() == m.GetDigest()
}

// serve follows the registry until ctx ends, then waits for the goroutines of the workers.
func (f *fleet) serve(ctx context.Context, instances <-chan []discovery.Instance) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for list := range instances {
		f.mu.Lock()
		gone := f.workers
		f.workers = map[string]*inferenceWorker{}
		for _, in := range list {
			key := in.Address + "/" + in.Meta["process"]
			if w, ok := gone[key]; ok {
				f.workers[key] = w
				delete(gone, key)
				continue
			}
			conn, err := f.dial(in.Address)
			if err != nil {
				continue // a malformed address; the next change of the registry corrects it
			}
			life, cancel := context.WithCancel(ctx)
			w := &inferenceWorker{name: in.Meta["worker"], address: in.Address, client: inferencev1.NewInferenceWorkerServiceClient(conn), cancel: cancel}
			f.workers[key] = w
			wg.Go(func() {
				defer func() { _ = conn.Close() }()
				f.follow(life, w)
			})
		}
		for _, w := range gone {
			w.cancel()
		}
		f.broadcast()
		f.mu.Unlock()
	}
}

// follow brings one worker to the wanted weights each time they change, until it is fenced.
func (f *fleet) follow(ctx context.Context, w *inferenceWorker) {
	pause := newBackoff(f.retry)
	for ctx.Err() == nil {
		f.mu.Lock()
		want, wanted, l := f.want, f.wanted, f.learner
		current := want == nil || w.has(want)
		f.mu.Unlock()
		if current {
			select {
			case <-ctx.Done():
			case <-wanted: // not changed: each of many workers that load the weights would wake all others
			}
			continue
		}
		receipt, err := f.load(ctx, w, want, l)
		switch {
		case err == nil && receipt.GetDigest() != want.GetDigest():
			f.fence(w, fmt.Errorf("worker %s loaded %s instead of %s", w.name, receipt.GetDigest(), want.GetDigest()))
			return
		case err == nil:
			w.path.succeeded()
			pause.reset()
			f.loaded(w, receipt)
		case w.path.fallBack(err):
		case rpcerr.Reason(err) == reasonMismatch:
			f.fence(w, err)
			return
		default:
			f.refused(w, wanted, err)
			sleep(ctx, pause.next())
		}
	}
}

// load has one worker load m, from the folder or from an offer.
func (f *fleet) load(ctx context.Context, w *inferenceWorker, m *weightsv1.WeightsManifest, l *learner) (*weightsv1.WeightsReceipt, error) {
	offers, err := f.transfer.offers(ctx, l, w, m, f.peers(w, m))
	if err != nil {
		return nil, err
	}
	loaded, err := w.client.LoadWeights(ctx, &inferencev1.LoadWeightsRequest{Weights: withoutContents(m), Offers: offers})
	return loaded.GetReceipt(), err
}

// peers returns the addresses of the other workers that have m loaded, in no particular order.
func (f *fleet) peers(w *inferenceWorker, m *weightsv1.WeightsManifest) (addresses []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, other := range f.workers {
		if other != w && !other.fenced && other.has(m) {
			addresses = append(addresses, other.address)
		}
	}
	return addresses
}

func (f *fleet) loaded(w *inferenceWorker, receipt *weightsv1.WeightsReceipt) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w.loaded, w.refusal = receipt, ""
	f.broadcast()
}

// refused records why a worker has not loaded the wanted weights.
func (f *fleet) refused(w *inferenceWorker, wanted chan struct{}, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	refusal, noSource := w.refusal, w.noSource
	w.refusal = rpcerr.Text(err)
	if rpcerr.Reason(err) == reasonNotFound {
		w.noSource = wanted
	}
	if w.refusal != refusal || w.noSource != noSource {
		f.broadcast()
	}
}

// fence excludes a worker for good.
func (f *fleet) fence(w *inferenceWorker, err error) {
	f.mu.Lock()
	w.fenced = true
	f.broadcast()
	f.mu.Unlock()
	f.fenced(w.name, err)
}

// setLearner sets the learner that offers weights; nil: no learner.
func (f *fleet) setLearner(l *learner) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.learner = l
}

// broadcast wakes every goroutine that waits for a change. The caller has the lock.
func (f *fleet) broadcast() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// setWanted changes the wanted weights and does not wait for the workers.
func (f *fleet) setWanted(m *weightsv1.WeightsManifest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.want = m
	close(f.wanted)
	f.wanted = make(chan struct{})
	f.broadcast()
}

// deliver sets the wanted weights, waits until every registered worker that is not fenced has
// loaded them, and returns how many have. Without workers it returns at once: later workers load
// the weights before they get work. errNoSource if a worker finds no process that has the weights.
func (f *fleet) deliver(ctx context.Context, m *weightsv1.WeightsManifest, waiting func(workers, reason string)) (int, error) {
	f.setWanted(m)
	for {
		now, changed := f.status(m)
		switch {
		case len(now.missing) == 0:
			return now.loaded, nil
		case now.noSource:
			return now.loaded, fmt.Errorf("%w%s", errNoSource, now.refusal)
		}
		waiting(enumerate(now.missing), now.refusal)
		select {
		case <-ctx.Done():
			return now.loaded, ctx.Err()
		case <-changed:
		}
	}
}

// deliveryStatus is how far the workers are with some weights.
type deliveryStatus struct {
	loaded   int
	missing  []string // workers that have not loaded them
	refusal  string   // why one of them has not
	noSource bool     // no process has the weights for one of them
}

// status also returns a channel that is closed at the next change.
func (f *fleet) status(m *weightsv1.WeightsManifest) (now deliveryStatus, changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.workers {
		switch {
		case w.fenced:
		case w.has(m):
			now.loaded++
		default:
			now.missing = append(now.missing, w.name)
			now.noSource = now.noSource || w.noSource == f.wanted
			if w.refusal != "" {
				now.refusal = fmt.Sprintf(" (%s: %s)", w.name, w.refusal)
			}
		}
	}
	return now, f.changed
}

// checkSource returns errNoSource if no worker has m loaded and one of them finds no process that
// has it.
func (f *fleet) checkSource(m *weightsv1.WeightsManifest) error {
	if now, _ := f.status(m); now.loaded == 0 && now.noSource {
		return fmt.Errorf("%w%s", errNoSource, now.refusal)
	}
	return nil
}

// pick returns a worker that has m loaded and is not in tried, or else nil; and a channel
// that is closed at the next change.
func (f *fleet) pick(m *weightsv1.WeightsManifest, tried map[*inferenceWorker]bool) (*inferenceWorker, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.workers {
		if !w.fenced && w.has(m) && !tried[w] {
			return w, f.changed
		}
	}
	return nil, f.changed
}

// statusTimeout is how long a worker may take to report its status.
const statusTimeout = 500 * time.Millisecond

// rewardRetries returns how many calls of the reward the workers repeated since it was called last.
// A worker that does not answer in time is counted next time.
func (f *fleet) rewardRetries(ctx context.Context) (repeated uint64) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	f.mu.Lock()
	workers := slices.Collect(maps.Values(f.workers))
	f.mu.Unlock()
	var wg sync.WaitGroup
	for _, w := range workers {
		wg.Go(func() {
			status, err := w.client.GetInferenceStatus(ctx, &inferencev1.GetInferenceStatusRequest{})
			f.mu.Lock()
			defer f.mu.Unlock()
			if now := status.GetRewardRetries(); err == nil && now > w.rewardRetries {
				repeated += now - w.rewardRetries
				w.rewardRetries = now
			}
		})
	}
	wg.Wait()
	return repeated
}

// mostNamed is how many workers a sentence names.
const mostNamed = 4

// enumerate names some workers and counts the others.
func enumerate(workers []string) string {
	if len(workers) <= mostNamed {
		return strings.Join(workers, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(workers[:mostNamed-1], ", "), len(workers)-mostNamed+1)
}
