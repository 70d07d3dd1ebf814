package controller

import (
	"context"
	"fmt"
	"slices"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// offers says how weights get to members that can't open the learner's folder: as patches upon what they hold, as adapters, or whole;
// from the learner, from members that hold them, or through the storage service. It is the run's `weights` table at work.
type offers struct {
	run    string
	stream bool // no member is asked to open the folder
	store  bool // through the storage service
	patch  bool

	learner learnerv1.LearnerWorkerServiceClient // nil while there is none
	address string                               // of the learner
}

// route is what was learned of a member: how weights got there, and what did not work.
type route struct {
	folder  bool // the learner's folder was opened there before
	network bool // the folder can't be opened there now, or held something else
	whole   bool // what it was offered last did not lead to the wanted weights
	misses  int  // how often what came was something else
}

// Reasons with which a worker refuses weights.
const (
	reasonUnreadable  = "WEIGHTS_UNREADABLE"
	reasonMismatch    = "WEIGHTS_DIGEST_MISMATCH"
	reasonBaseMissing = "WEIGHTS_BASE_MISSING"
	reasonCorrupt     = "WEIGHTS_PATCH_CORRUPT"
	reasonNotHeld     = "WEIGHTS_NOT_HELD" // of the learner, where no worker has them either
)

// trusted is how often a member's weights may turn out to be something else before it gets nothing but the whole.
const trusted = 2

// detour reports whether there is another way after a refusal, and takes it. A worker whose engine holds something else than it was
// sent leaves by itself: for that there is none.
func (r *route) detour(err error) bool {
	before := *r
	switch rpcerr.Reason(err) {
	case reasonUnreadable:
		r.network = true
	case reasonBaseMissing, reasonCorrupt:
		r.whole = true
	case reasonMismatch:
		if e, ok := rpcerr.From(err); ok && e.Metadata()["held"] == "true" {
			return false
		}
		r.network, r.whole = true, true
		r.misses++
		return !before.whole
	}
	return *r != before
}

// arrived forgets a detour that is over.
func (r *route) arrived() {
	r.folder = r.folder || !r.network
	r.network = !r.folder
	r.whole = r.misses >= trusted
}

// of returns the offers for a member; none means the folder. peers are members that hold want; m's own goroutine alone calls it.
func (o offers) of(ctx context.Context, m *member, want *weightsv1.WeightsManifest, peers []string) ([]*weightsv1.WeightsOffer, error) {
	if !m.route.network && !o.stream && !o.store {
		return nil, nil
	}
	if o.learner == nil {
		return whole(want, peers), nil
	}
	req := &learnerv1.OfferWeightsRequest{RunId: o.run, Digest: want.GetDigest(), Store: o.store, Whole: m.route.whole}
	if o.patch && !m.route.whole {
		req.BaseDigest = m.loaded.GetDigest()
	}
	got, err := o.learner.OfferWeights(ctx, req)
	if err != nil {
		if len(peers) > 0 {
			return whole(want, peers), nil
		}
		return nil, fmt.Errorf("ask the learner at %s for weights version %d: %w", o.address, want.GetVersion(), err)
	}
	if !o.store {
		for _, offer := range got.GetOffers() {
			offer.Peers = []string{o.address}
			if offer.GetDigest() == want.GetDigest() {
				offer.Peers = append(slices.Clone(peers), o.address)
			}
		}
	}
	return got.GetOffers(), nil
}

// whole is w as those stream it who hold it; nil where nobody does.
func whole(w *weightsv1.WeightsManifest, peers []string) []*weightsv1.WeightsOffer {
	if len(peers) == 0 {
		return nil
	}
	return []*weightsv1.WeightsOffer{{
		Version: w.GetVersion(), Digest: w.GetDigest(), Form: max(w.GetForm(), weightsv1.WeightsForm_WEIGHTS_FORM_WHOLE), Bytes: w.GetBytes(), Peers: peers,
	}}
}
