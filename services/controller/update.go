package controller

import (
	"context"
	"errors"
	"time"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// policy is when a worker that has staged a version commits it (weights.update).
//
//	in_flight   at once: LoadWeights does both phases in one call
//	rolling     when all workers have staged it, a bounded share of them at a time:
//	            Stage | all staged | turn | Commit after the worker's requests
//	atomic      when all workers have staged it, and none samples:
//	            Stage | all staged | Pause | all paused | Commit | all committed | Resume
//
// A bar is a gate of the round, which opens when each worker has reached it or is left out. A
// worker that joins after a gate has opened passes it alone.
type policy string

const (
	updateInFlight policy = "in_flight"
	updateRolling  policy = "rolling"
	updateAtomic   policy = "atomic"
)

// errOutdated reports that other weights are wanted by now.
var errOutdated = errors.New("other weights are wanted")

// place is how far a worker is with the wanted weights.
type place int

const (
	behind place = iota
	staged
	paused
	committed
)

// round is the move of the workers to one version. The fleet's lock guards it.
type round struct {
	gates [committed + 1]chan struct{} // closed when open
}

func newRound() *round {
	r := &round{}
	for at := range r.gates {
		r.gates[at] = make(chan struct{})
	}
	return r
}

// advance opens the gates that can open. The caller has the lock.
func (f *fleet) advance() {
	for at := staged; at <= committed; at++ {
		if closed(f.round.gates[at]) {
			continue
		}
		if !f.reached(at) {
			return
		}
		close(f.round.gates[at])
	}
}

// reached reports whether no worker that takes part in the round is on its way to a place. To the
// first one, all workers are; to the others, those that have reached the place before.
func (f *fleet) reached(at place) bool {
	there := false
	for _, w := range f.workers {
		switch {
		case w.fenced:
		case w.at >= at, f.want != nil && w.has(f.want): // the same weights may be wanted again
			there = true
		case !w.left && (at == staged || w.at == at-1):
			return false
		}
	}
	return there
}

// reach records that a worker has reached a place, and returns when the gate is open.
func (f *fleet) reach(ctx context.Context, w *inferenceWorker, at place, wanted <-chan struct{}) error {
	f.mu.Lock()
	if closed(wanted) {
		f.mu.Unlock()
		return errOutdated
	}
	w.at = at
	gate := f.round.gates[at]
	f.advance()
	f.mu.Unlock()
	select {
	case <-gate:
		return nil
	case <-wanted:
		return errOutdated
	case <-ctx.Done():
		return ctx.Err()
	}
}

// update brings one worker to m. errOutdated if other weights are wanted before it commits.
func (f *fleet) update(ctx context.Context, w *inferenceWorker, m *weightsv1.WeightsManifest, l *learner, wanted <-chan struct{}) (*weightsv1.WeightsReceipt, error) {
	offers, err := f.transfer.offers(ctx, l, w, m, f.peers(w, m))
	if err != nil {
		return nil, err
	}
	if f.policy == updateInFlight {
		loaded, err := w.client.LoadWeights(ctx, &inferencev1.LoadWeightsRequest{Weights: withoutContents(m), Offers: offers})
		return loaded.GetReceipt(), err
	}
	if _, err := w.client.StageWeights(ctx, &inferencev1.StageWeightsRequest{Weights: withoutContents(m), Offers: offers}); err != nil {
		return nil, err
	}
	if err := f.reach(ctx, w, staged, wanted); err != nil {
		return nil, err
	}
	if f.policy == updateRolling {
		return f.commitInTurn(ctx, w, m, wanted)
	}
	return f.commitTogether(ctx, w, m, wanted)
}

// commitInTurn commits m when it is the worker's turn, after its requests.
func (f *fleet) commitInTurn(ctx context.Context, w *inferenceWorker, m *weightsv1.WeightsManifest, wanted <-chan struct{}) (*weightsv1.WeightsReceipt, error) {
	done, err := f.turn(ctx, wanted)
	if err != nil {
		return nil, err
	}
	defer done()
	return f.commit(ctx, w, m, true)
}

// turn waits until fewer than a quarter of the workers commit, and returns what ends the turn.
func (f *fleet) turn(ctx context.Context, wanted <-chan struct{}) (done func(), err error) {
	for {
		f.mu.Lock()
		if f.turns < max(1, len(f.workers)/4) {
			f.turns++
			f.mu.Unlock()
			return func() {
				f.mu.Lock()
				defer f.mu.Unlock()
				f.turns--
				f.broadcast()
			}, nil
		}
		changed := f.changed
		f.mu.Unlock()
		select {
		case <-changed:
		case <-wanted:
			return nil, errOutdated
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// commitTogether commits m while no worker samples.
func (f *fleet) commitTogether(ctx context.Context, w *inferenceWorker, m *weightsv1.WeightsManifest, wanted <-chan struct{}) (*weightsv1.WeightsReceipt, error) {
	if err := pause(ctx, w); err != nil {
		return nil, err
	}
	w.hold(ctx)
	if err := f.reach(ctx, w, paused, wanted); err != nil {
		return nil, err
	}
	receipt, err := f.commit(ctx, w, m, false)
	if err != nil || receipt.GetDigest() != m.GetDigest() {
		return receipt, err
	}
	if err := f.reach(ctx, w, committed, wanted); err != nil {
		return nil, err
	}
	return receipt, w.resume(ctx)
}

func (f *fleet) commit(ctx context.Context, w *inferenceWorker, m *weightsv1.WeightsManifest, drain bool) (*weightsv1.WeightsReceipt, error) {
	done, err := w.client.CommitWeights(ctx, &inferencev1.CommitWeightsRequest{
		RunId: f.runID, Version: m.GetVersion(), Digest: m.GetDigest(), Drain: drain,
	})
	return done.GetReceipt(), err
}

const (
	// pauseSeconds is how long a worker waits for a controller that does not resume it.
	pauseSeconds = 60
	// pauseTimeout is how long a worker that is left out may take to pause.
	pauseTimeout = 5 * time.Second
)

func pause(ctx context.Context, w *inferenceWorker) error {
	_, err := w.client.PauseEngine(ctx, &inferencev1.PauseEngineRequest{MaxSeconds: pauseSeconds})
	return err
}

// silence pauses a worker that is left out of an atomic update until it resumes, as well as it can:
// one that can't be reached serves no one either. It does nothing for other policies.
func (f *fleet) silence(ctx context.Context, w *inferenceWorker) {
	if f.policy == updateAtomic {
		w.pauseSoon(ctx)
		w.hold(ctx)
	}
}

// pauseSoon pauses a worker, if it answers in time.
func (w *inferenceWorker) pauseSoon(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, pauseTimeout)
	defer cancel()
	_ = pause(ctx, w)
}

// hold renews the pause of a worker until free or resume, or until ctx ends.
func (w *inferenceWorker) hold(ctx context.Context) {
	if w.held() {
		return
	}
	waiting, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for sleep(waiting, pauseSeconds*time.Second/3); waiting.Err() == nil; sleep(waiting, pauseSeconds*time.Second/3) {
			w.pauseSoon(ctx) // it ends before the worker resumes
		}
	}()
	w.release = func() { stop(); <-done }
}

func (w *inferenceWorker) held() bool { return w.release != nil }

// free lets the pause of a worker end by itself.
func (w *inferenceWorker) free() {
	if w.held() {
		w.release()
		w.release = nil
	}
}

// resume ends the pause of a worker.
func (w *inferenceWorker) resume(ctx context.Context) error {
	w.free()
	_, err := w.client.ResumeEngine(ctx, &inferencev1.ResumeEngineRequest{})
	return err
}
