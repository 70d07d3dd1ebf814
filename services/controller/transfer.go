package controller

import (
	"context"
	"fmt"
	"slices"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// Reasons with which a worker refuses weights.
const (
	reasonUnreadable  = "WEIGHTS_UNREADABLE"
	reasonMismatch    = "WEIGHTS_DIGEST_MISMATCH"
	reasonBaseMissing = "WEIGHTS_BASE_MISSING"
	reasonCorrupt     = "WEIGHTS_PATCH_CORRUPT"
	reasonNotFound    = "WEIGHTS_NOT_FOUND" // of the learner, where no worker has them either
)

// transfer decides how weights get to an inference worker: from the folder of the learner, as a
// stream from the learner or from other workers, or through the storage service; and as a patch, as
// an adapter, or whole. It implements the `weights` table of the config.
type transfer struct {
	runID  string
	stream bool // no worker opens the folder
	store  bool // through the storage service
	patch  bool
}

func newTransfer(s settings) transfer {
	w := s.cfg.GetWeights()
	return transfer{runID: s.runID, stream: w.GetWay() == "stream", store: w.GetWay() == "store", patch: w.GetPatch() != "off"}
}

// offers returns the offers for a worker; none means the folder. l is nil without a learner; peers
// are the addresses of workers that have want loaded. Only the worker's own goroutine calls it.
func (t transfer) offers(ctx context.Context, l *learner, w *inferenceWorker, want *weightsv1.WeightsManifest, peers []string) ([]*weightsv1.WeightsOffer, error) {
	if !w.path.network && !t.stream && !t.store {
		return nil, nil
	}
	if l == nil {
		return offerWhole(want, peers), nil
	}
	req := &learnerv1.OfferWeightsRequest{RunId: t.runID, Digest: want.GetDigest(), Store: t.store, Whole: w.path.whole}
	if t.patch && !w.path.whole {
		req.BaseDigest = w.loaded.GetDigest()
	}
	got, err := l.client.OfferWeights(ctx, req)
	if err != nil {
		if len(peers) > 0 {
			return offerWhole(want, peers), nil
		}
		return nil, fmt.Errorf("ask the learner at %s for weights version %d: %w", l.address, want.GetVersion(), err)
	}
	if !t.store {
		for _, offer := range got.GetOffers() {
			offer.Peers = []string{l.address}
			if offer.GetDigest() == want.GetDigest() {
				offer.Peers = append(slices.Clone(peers), l.address)
			}
		}
	}
	return got.GetOffers(), nil
}

// offerWhole offers w as a stream from peers; nil without peers.
func offerWhole(w *weightsv1.WeightsManifest, peers []string) []*weightsv1.WeightsOffer {
	if len(peers) == 0 {
		return nil
	}
	return []*weightsv1.WeightsOffer{{
		Version: w.GetVersion(), Digest: w.GetDigest(), Form: max(w.GetForm(), weightsv1.WeightsForm_WEIGHTS_FORM_WHOLE), Bytes: w.GetBytes(), Peers: peers,
	}}
}

// path is what earlier transfers to a worker showed about the next one.
type path struct {
	folder     bool // the worker opened the learner's folder before
	network    bool // it can't open the folder now, or found other weights there
	whole      bool // it needs the whole weights, because the last offer did not lead to them
	mismatches int  // how often an offer led to other weights
}

// maxMismatches is how many mismatches a worker may have before it gets only whole weights.
const maxMismatches = 2

// fallBack changes the path after a refusal, and reports whether there is another way to try. There
// is none if the engine itself has other weights than it was given: such a worker exits by itself.
func (p *path) fallBack(err error) bool {
	before := *p
	switch rpcerr.Reason(err) {
	case reasonUnreadable:
		p.network = true
	case reasonBaseMissing, reasonCorrupt:
		p.whole = true
	case reasonMismatch:
		if e, ok := rpcerr.From(err); ok && e.Metadata()["current"] == "true" {
			return false
		}
		p.network, p.whole = true, true
		p.mismatches++
		return !before.whole
	}
	return *p != before
}

// succeeded resets the path after a transfer.
func (p *path) succeeded() {
	p.folder = p.folder || !p.network
	p.network = !p.folder
	p.whole = p.mismatches >= maxMismatches
}

// withoutContents returns w without its tensors and files. A worker gets them together with the
// weights and verifies them by the digest; sending them to each worker would cost time in every
// step.
func withoutContents(w *weightsv1.WeightsManifest) *weightsv1.WeightsManifest {
	return &weightsv1.WeightsManifest{
		RunId: w.GetRunId(), Version: w.GetVersion(), Digest: w.GetDigest(), Directory: w.GetDirectory(), Dtype: w.GetDtype(),
		Bytes: w.GetBytes(), Form: w.GetForm(), Lineage: w.GetLineage(),
	}
}
