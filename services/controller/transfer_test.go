package controller

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

func notHeld(reason string) *rpcerr.Error {
	return rpcerr.New(codes.FailedPrecondition, reason, "refused")
}

// described says how weights were offered: "folder", "whole@learner-1", "patch@store".
func described(offers []*weightsv1.WeightsOffer) string {
	if len(offers) == 0 {
		return "folder"
	}
	var all []string
	for _, o := range offers {
		sources := strings.Join(o.GetPeers(), ",")
		if o.GetContentId() != "" {
			sources = "store"
		}
		all = append(all, strings.ToLower(strings.TrimPrefix(o.GetForm().String(), "WEIGHTS_FORM_"))+"@"+sources)
	}
	return strings.Join(all, " ")
}

// driven runs to the end and returns how each version came to the worker.
func driven(t *testing.T, w *world, weights *configv1.WeightsConfig) []string {
	t.Helper()
	s, stop := w.start()
	defer stop()
	req := request(t, steps)
	req.Plan.Config.Weights = weights
	if _, err := s.StartRun(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	finish(t, s)
	correct(t, w)
	w.inference.mu.Lock()
	defer w.inference.mu.Unlock()
	return slices.Clone(w.inference.offered)
}

func TestHowWeightsAreOffered(t *testing.T) {
	t.Parallel()
	elsewhere := func(in *inferencev1.LoadWeightsRequest) error {
		if len(in.GetOffers()) == 0 {
			return notHeld(reasonUnreadable)
		}
		return nil
	}
	for name, c := range map[string]struct {
		weights *configv1.WeightsConfig
		refuses func(in *inferencev1.LoadWeightsRequest) error
		want    string
	}{
		"on the learner's host": {want: "folder folder folder folder folder"},
		"elsewhere":             {refuses: elsewhere, want: "whole@LEARNER patch@LEARNER patch@LEARNER patch@LEARNER patch@LEARNER"},
		"patches off": {
			weights: &configv1.WeightsConfig{Patch: proto.String("off")}, refuses: elsewhere,
			want: "whole@LEARNER whole@LEARNER whole@LEARNER whole@LEARNER whole@LEARNER",
		},
		"streamed in any case": {
			weights: &configv1.WeightsConfig{Way: proto.String("stream")},
			want:    "whole@LEARNER patch@LEARNER patch@LEARNER patch@LEARNER patch@LEARNER",
		},
		"through the store": {
			weights: &configv1.WeightsConfig{Way: proto.String("store")},
			want:    "whole@store patch@store patch@store patch@store patch@store",
		},
		"a base that is not there": {
			weights: &configv1.WeightsConfig{Way: proto.String("stream")},
			refuses: func(in *inferencev1.LoadWeightsRequest) error {
				if in.GetWeights().GetVersion() == 2 && in.GetOffers()[0].GetForm() == weightsv1.WeightsForm_WEIGHTS_FORM_PATCH {
					return notHeld(reasonBaseMissing)
				}
				return nil
			},
			want: "whole@LEARNER patch@LEARNER whole@LEARNER patch@LEARNER patch@LEARNER",
		},
		"a folder that holds something else, once": {
			refuses: func(in *inferencev1.LoadWeightsRequest) error {
				if in.GetWeights().GetVersion() == 2 && len(in.GetOffers()) == 0 {
					return notHeld(reasonMismatch)
				}
				return nil
			},
			want: "folder folder whole@LEARNER folder folder",
		},
		"patches that lead elsewhere": {
			weights: &configv1.WeightsConfig{Way: proto.String("stream")},
			refuses: func(in *inferencev1.LoadWeightsRequest) error {
				if in.GetOffers()[0].GetForm() == weightsv1.WeightsForm_WEIGHTS_FORM_PATCH {
					return notHeld(reasonMismatch)
				}
				return nil
			},
			want: "whole@LEARNER whole@LEARNER whole@LEARNER whole@LEARNER whole@LEARNER",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.inference.refuses = c.refuses
			got := driven(t, w, c.weights)
			want := strings.Fields(strings.ReplaceAll(c.want, "LEARNER", w.learner.address))
			if !slices.Equal(got, want) {
				t.Fatalf("weights came as %q, not %q", got, want)
			}
		})
	}
}

// A worker whose engine holds something else than it was sent has no other way: it leaves.
func TestDetours(t *testing.T) {
	t.Parallel()
	p := path{}
	if p.fallBack(notHeld(reasonMismatch).With("held", "true")) || p != (path{}) {
		t.Fatalf("an engine that holds something else is sent more: %+v", p)
	}
	if p.fallBack(notHeld("INTERNAL")) || p != (path{}) {
		t.Fatalf("an unknown failure changes the way: %+v", p)
	}
	if !p.fallBack(notHeld(reasonMismatch)) || p.fallBack(notHeld(reasonMismatch)) {
		t.Fatal("a worker that finds something else in the whole as well is to be fenced")
	}
	p = path{}
	p.succeeded()
	if !p.fallBack(notHeld(reasonUnreadable)) || !p.network || p.fallBack(notHeld(reasonUnreadable)) {
		t.Fatalf("a folder that can't be opened makes %+v", p)
	}
	if p.succeeded(); p.network {
		t.Fatal("a folder that was pruned once is not opened any more")
	}
}

// A worker that joins while there is no learner gets the weights from one that holds them.
func TestWithoutALearnerWorkersServeEachOther(t *testing.T) {
	t.Parallel()
	want := &weightsv1.WeightsManifest{Version: 3, Digest: digestAt(3), Bytes: 9}
	f := newFleet(settings{runID: run, incarnation: 1}, nil, 0, nil)
	holder := &inferenceWorker{address: "inference-1", loaded: &weightsv1.WeightsReceipt{Version: 3, Digest: digestAt(3)}}
	late := &inferenceWorker{address: "inference-2", path: path{network: true}}
	f.workers = map[string]*inferenceWorker{"1": holder, "2": late, "3": {address: "inference-3", fenced: true, loaded: holder.loaded}}
	got, err := f.transfer.offers(t.Context(), nil, late, want, f.peers(late, want))
	if err != nil || described(got) != "whole@inference-1" || got[0].GetBytes() != 9 || got[0].GetDigest() != want.GetDigest() {
		t.Fatalf("offered %v, %v", got, err)
	}
}
