package controller

import (
	"context"
	"fmt"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

type member struct {
	worker  string
	address string
	client  inferencev1.InferenceWorkerServiceClient
	loaded  *weightsv1.WeightsReceipt // nil before the first
	refusal string                    // why the last try to bring it to newer ones failed
	nowhere chan struct{}             // the aim whose weights nobody had for it; nil: none
	route   route                     // of its goroutine alone
	fenced  bool
	cancel  context.CancelFunc

	retries uint64 // of the reward that it told of last, since its start
}

func (m *member) holds(w *weightsv1.WeightsManifest) bool {
	return m.loaded != nil && m.loaded.GetVersion() == w.GetVersion() && m.loaded.GetDigest() == w.GetDigest()
}

// follow brings one member to the wanted weights, again and again.
func (f *fleet) follow(ctx context.Context, m *member) {
	pause := f.retry
	for ctx.Err() == nil {
		f.mu.Lock()
		want, aimed, offers := f.want, f.aimed, f.offers // not changed: each of many that took the weights over would wake all others
		current := want == nil || m.holds(want)
		f.mu.Unlock()
		if current {
			select {
			case <-ctx.Done():
			case <-aimed:
			}
			continue
		}
		loaded, err := f.load(ctx, m, want, offers)
		if err == nil && loaded.GetReceipt().GetDigest() != want.GetDigest() {
			err = fmt.Errorf("worker %s holds %s and was sent %s", m.worker, loaded.GetReceipt().GetDigest(), want.GetDigest())
		} else if err != nil && m.route.detour(err) {
			continue
		} else if err != nil && rpcerr.Reason(err) != reasonMismatch {
			f.refused(m, aimed, err)
			sleep(ctx, pause)
			pause = min(2*pause, 20*f.retry)
			continue
		}
		pause = f.retry
		f.mu.Lock()
		if err == nil {
			m.loaded, m.refusal = loaded.GetReceipt(), ""
			m.route.arrived()
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

// refused notes why a member does not have the weights of an aim yet.
func (f *fleet) refused(m *member, aimed chan struct{}, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before, nowhere := m.refusal, m.nowhere
	m.refusal = rpcerr.Text(err)
	if rpcerr.Reason(err) == reasonNotHeld {
		m.nowhere = aimed
	}
	if m.refusal != before || m.nowhere != nowhere {
		f.broadcast()
	}
}

// load has one member take over w, from the folder or from what it is offered.
func (f *fleet) load(ctx context.Context, m *member, w *weightsv1.WeightsManifest, by offers) (*inferencev1.LoadWeightsResponse, error) {
	offered, err := by.of(ctx, m, w, f.peers(m, w))
	if err != nil {
		return nil, err
	}
	return m.client.LoadWeights(ctx, &inferencev1.LoadWeightsRequest{Weights: named(w), Offers: offered})
}

// named is w without its tensors and files, which a member finds where it gets them and its digest answers for: they would be sent to
// each, and looked through there, in the middle of every step.
func named(w *weightsv1.WeightsManifest) *weightsv1.WeightsManifest {
	return &weightsv1.WeightsManifest{
		RunId: w.GetRunId(), Version: w.GetVersion(), Digest: w.GetDigest(), Directory: w.GetDirectory(), Dtype: w.GetDtype(),
		Bytes: w.GetBytes(), Form: w.GetForm(),
	}
}

// peers is where w can be streamed from: the members that hold it, in no set order.
func (f *fleet) peers(m *member, w *weightsv1.WeightsManifest) (addresses []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, other := range f.members {
		if other != m && !other.fenced && other.holds(w) {
			addresses = append(addresses, other.address)
		}
	}
	return addresses
}
