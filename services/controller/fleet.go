package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/worker"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// fleet is the inference workers of a run. One goroutine per worker brings it to the wanted weights
// as the policy says, so that a worker that joins late catches up by itself. A worker that can't
// load them is left out: it serves its version, does not delay the others, and tries again.
type fleet struct {
	settings
	transfer transfer
	policy   policy
	dial     func(run string, incarnation uint32, address string) (Conn, error)
	retry    time.Duration
	observer observer

	mu      sync.Mutex
	learner *learner // that offers weights; nil: none
	want    *weightsv1.WeightsManifest
	origin  trace.SpanContext           // of the step that made the wanted weights
	wanted  chan struct{}               // closed and replaced when want changes
	round   *round                      // of want
	turns   int                         // workers that commit by turns now
	workers map[string]*inferenceWorker // by address and process
	changed chan struct{}               // closed and replaced at each change
}

// observer is notified of workers that can't follow an update. Any goroutine calls it, without the
// fleet's lock.
type observer interface {
	// fenced: the worker can't verify its weights.
	fenced(worker string, err error)
	// leftOut: the worker could not load a version and serves an older one. It tries again.
	leftOut(worker string, version uint64, err error)
	// caughtUp: a worker that was left out has loaded the wanted version, or is gone (nil).
	caughtUp(worker string, m *weightsv1.WeightsManifest)
}

func newFleet(s settings, dial func(run string, incarnation uint32, address string) (Conn, error), retry time.Duration, o observer) *fleet {
	return &fleet{
		settings: s, transfer: newTransfer(s), policy: policy(cmp.Or(s.cfg.GetWeights().GetUpdate(), string(updateInFlight))),
		dial: dial, retry: retry, observer: o, round: newRound(),
		workers: map[string]*inferenceWorker{}, wanted: make(chan struct{}), changed: make(chan struct{}),
	}
}

// inferenceWorker is what the fleet knows of one worker. The fleet's lock guards it, except path
// and release.
type inferenceWorker struct {
	name     string
	address  string
	client   inferencev1.InferenceWorkerServiceClient
	cancel   context.CancelFunc
	path     path                      // only its own goroutine uses it
	release  func()                    // ends the renewal of its pause; nil: not paused; like path
	loaded   *weightsv1.WeightsReceipt // nil before the first
	refusal  string                    // why it did not load the wanted weights at the last attempt
	noSource chan struct{}             // fleet.wanted at the time when no process had the weights for it; nil: never
	fenced   bool
	at       place // in the current round
	left     bool  // out of updates, since it could not load a version

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
			conn, err := f.dial(in.Meta["run"], worker.IncarnationOf(in), in.Address)
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
		var left []string
		for _, w := range gone {
			w.cancel()
			if w.left {
				left = append(left, w.name)
			}
		}
		f.broadcast()
		f.mu.Unlock()
		for _, name := range left {
			f.observer.caughtUp(name, nil)
		}
	}
}

// follow brings one worker to the wanted weights each time they change, until it is fenced.
func (f *fleet) follow(ctx context.Context, w *inferenceWorker) {
	defer w.free()
	pause := newBackoff(f.retry)
	for ctx.Err() == nil {
		f.mu.Lock()
		want, wanted, origin, l := f.want, f.wanted, f.origin, f.learner
		current := want == nil || w.has(want)
		f.mu.Unlock()
		if current {
			if w.held() { // other weights were wanted meanwhile
				_ = w.resume(ctx) // else the pause ends by itself
			}
			select {
			case <-ctx.Done():
			case <-wanted: // not changed: each of many workers that load the weights would wake all others
			}
			continue
		}
		receipt, err := f.update(trace.ContextWithSpanContext(ctx, origin), w, want, l, wanted)
		switch {
		case errors.Is(err, errOutdated), err == nil && receipt.GetDigest() == want.GetDigest():
			pause.reset()
			if err == nil {
				w.path.succeeded()
				f.loaded(w, want, receipt)
			}
		case err == nil:
			f.fence(w, fmt.Errorf("worker %s loaded %s instead of %s", w.name, receipt.GetDigest(), want.GetDigest()))
			return
		case w.path.fallBack(err):
		case rpcerr.Reason(err) == reasonMismatch:
			f.fence(w, err)
			return
		case ctx.Err() == nil:
			f.refused(ctx, w, want, wanted, err)
			sleep(ctx, pause.next())
		}
	}
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

func (f *fleet) loaded(w *inferenceWorker, m *weightsv1.WeightsManifest, receipt *weightsv1.WeightsReceipt) {
	f.mu.Lock()
	left := w.left
	w.loaded, w.refusal, w.left = receipt, "", false
	f.broadcast()
	f.mu.Unlock()
	if left {
		f.observer.caughtUp(w.name, m)
	}
}

// refused leaves a worker out that has not loaded the wanted weights, and records why.
func (f *fleet) refused(ctx context.Context, w *inferenceWorker, m *weightsv1.WeightsManifest, wanted chan struct{}, err error) {
	f.silence(ctx, w) // before the others change
	f.mu.Lock()
	if ctx.Err() != nil { // the registry has dropped the worker
		f.mu.Unlock()
		return
	}
	first := !w.left
	refusal, noSource := w.refusal, w.noSource
	w.refusal, w.left, w.at = rpcerr.Text(err), true, behind
	if rpcerr.Reason(err) == reasonNotFound {
		w.noSource = wanted
	}
	if w.refusal != refusal || w.noSource != noSource || first {
		f.broadcast()
	}
	f.mu.Unlock()
	if first {
		f.observer.leftOut(w.name, m.GetVersion(), err)
	}
}

// fence excludes a worker for good.
func (f *fleet) fence(w *inferenceWorker, err error) {
	f.mu.Lock()
	w.fenced = true
	f.broadcast()
	f.mu.Unlock()
	f.observer.fenced(w.name, err)
}

// setLearner sets the learner that offers weights; nil: no learner.
func (f *fleet) setLearner(l *learner) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.learner = l
}

// broadcast follows a change of the workers: it opens gates and wakes every goroutine that waits
// for one. The caller has the lock.
func (f *fleet) broadcast() {
	f.advance()
	close(f.changed)
	f.changed = make(chan struct{})
}

// setWanted changes the wanted weights and does not wait for the workers, whose calls continue the
// trace of ctx.
func (f *fleet) setWanted(ctx context.Context, m *weightsv1.WeightsManifest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.want, f.origin, f.round = m, trace.SpanContextFromContext(ctx), newRound()
	for _, w := range f.workers {
		w.at = behind
	}
	close(f.wanted)
	f.wanted = make(chan struct{})
	f.broadcast()
}

// deliver sets the wanted weights, waits until every registered worker that is not fenced or left
// out has loaded them, and returns how many have; at least one if there are any. Without workers it
// returns at once: later workers load the weights before they get work. errNoSource if no worker
// has them and one finds no process that does.
func (f *fleet) deliver(ctx context.Context, m *weightsv1.WeightsManifest, waiting func(workers []string, reason string)) (int, error) {
	f.setWanted(ctx, m)
	for {
		now, changed := f.status(m)
		switch {
		case len(now.missing) == 0 && (now.loaded > 0 || len(now.left) == 0):
			return now.loaded, nil
		case now.loaded == 0 && now.noSource:
			return now.loaded, fmt.Errorf("%w%s", errNoSource, now.refusal)
		}
		waiting(append(now.missing, now.left...), now.refusal)
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
	missing  []string // workers that are loading them
	left     []string // workers that could not load them, and try again
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
			if w.left {
				now.left = append(now.left, w.name)
			} else {
				now.missing = append(now.missing, w.name)
			}
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

// holding returns the workers that have m loaded, ordered by name.
func (f *fleet) holding(m *weightsv1.WeightsManifest) (workers []*inferenceWorker) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.workers {
		if !w.fenced && w.has(m) {
			workers = append(workers, w)
		}
	}
	slices.SortFunc(workers, func(a, b *inferenceWorker) int { return cmp.Compare(a.name, b.name) })
	return workers
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
