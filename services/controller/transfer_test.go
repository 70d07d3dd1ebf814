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

func refusalOf(reason string) *rpcerr.Error {
	return rpcerr.New(codes.FailedPrecondition, reason, "refused")
}

// describe returns how weights were offered: "folder", "whole@learner-1", "patch@store".
func describe(offers []*weightsv1.WeightsOffer) string {
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

// transfers runs to the end and returns how each version got to the worker.
func transfers(t *testing.T, w *world, weights *configv1.WeightsConfig) []string {
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

func TestTransfersOfWeights(t *testing.T) {
	t.Parallel()
	otherHost := func(in *inferencev1.LoadWeightsRequest) error {
		if len(in.GetOffers()) == 0 {
			return refusalOf(reasonUnreadable)
		}
		return nil
	}
	for name, c := range map[string]struct {
		weights *configv1.WeightsConfig
		refuses func(in *inferencev1.LoadWeightsRequest) error
		want    string
	}{
		"same host":  {want: "folder folder folder folder folder"},
		"other host": {refuses: otherHost, want: "whole@LEARNER patch@LEARNER patch@LEARNER patch@LEARNER patch@LEARNER"},
		"patches off": {
			weights: &configv1.WeightsConfig{Patch: proto.String("off")}, refuses: otherHost,
			want: "whole@LEARNER whole@LEARNER whole@LEARNER whole@LEARNER whole@LEARNER",
		},
		"always streamed": {
			weights: &configv1.WeightsConfig{Way: proto.String("stream")},
			want:    "whole@LEARNER patch@LEARNER patch@LEARNER patch@LEARNER patch@LEARNER",
		},
		"through the store": {
			weights: &configv1.WeightsConfig{Way: proto.String("store")},
			want:    "whole@store patch@store patch@store patch@store patch@store",
		},
		"missing base": {
			weights: &configv1.WeightsConfig{Way: proto.String("stream")},
			refuses: func(in *inferencev1.LoadWeightsRequest) error {
				if in.GetWeights().GetVersion() == 2 && in.GetOffers()[0].GetForm() == weightsv1.WeightsForm_WEIGHTS_FORM_PATCH {
					return refusalOf(reasonBaseMissing)
				}
				return nil
			},
			want: "whole@LEARNER patch@LEARNER whole@LEARNER patch@LEARNER patch@LEARNER",
		},
		"other weights in the folder, once": {
			refuses: func(in *inferencev1.LoadWeightsRequest) error {
				if in.GetWeights().GetVersion() == 2 && len(in.GetOffers()) == 0 {
					return refusalOf(reasonMismatch)
				}
				return nil
			},
			want: "folder folder whole@LEARNER folder folder",
		},
		"patches that lead to other weights": {
			weights: &configv1.WeightsConfig{Way: proto.String("stream")},
			refuses: func(in *inferencev1.LoadWeightsRequest) error {
				if in.GetOffers()[0].GetForm() == weightsv1.WeightsForm_WEIGHTS_FORM_PATCH {
					return refusalOf(reasonMismatch)
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
			got := transfers(t, w, c.weights)
			want := strings.Fields(strings.ReplaceAll(c.want, "LEARNER", w.learner.address))
			if !slices.Equal(got, want) {
				t.Fatalf("weights were transferred as %q, want %q", got, want)
			}
		})
	}
}

// There is no fallback for a worker whose engine has other weights than it was given: it exits.
func TestFallbacks(t *testing.T) {
	t.Parallel()
	p := path{}
	if p.fallBack(refusalOf(reasonMismatch).With("current", "true")) || p != (path{}) {
		t.Fatalf("an engine with other weights is sent more: %+v", p)
	}
	if p.fallBack(refusalOf("INTERNAL")) || p != (path{}) {
		t.Fatalf("an unknown failure changes the path: %+v", p)
	}
	if !p.fallBack(refusalOf(reasonMismatch)) || p.fallBack(refusalOf(reasonMismatch)) {
		t.Fatal("a worker for which the whole weights mismatch too must be fenced")
	}
	p = path{}
	p.succeeded()
	if !p.fallBack(refusalOf(reasonUnreadable)) || !p.network || p.fallBack(refusalOf(reasonUnreadable)) {
		t.Fatalf("a folder that can't be opened makes %+v", p)
	}
	if p.succeeded(); p.network {
		t.Fatal("a folder that was missing once is never opened again")
	}
}

// A worker that joins while no learner is up gets the weights from a worker that has loaded them.
func TestWithoutALearnerWorkersStreamFromEachOther(t *testing.T) {
	t.Parallel()
	want := &weightsv1.WeightsManifest{Version: 3, Digest: digestAt(3), Bytes: 9}
	f := newFleet(settings{runID: run, incarnation: 1}, nil, 0, nil)
	holder := &inferenceWorker{address: "inference-1", loaded: &weightsv1.WeightsReceipt{Version: 3, Digest: digestAt(3)}}
	late := &inferenceWorker{address: "inference-2", path: path{network: true}}
	f.workers = map[string]*inferenceWorker{"1": holder, "2": late, "3": {address: "inference-3", fenced: true, loaded: holder.loaded}}
	got, err := f.transfer.offers(t.Context(), nil, late, want, f.peers(late, want))
	if err != nil || describe(got) != "whole@inference-1" || got[0].GetBytes() != 9 || got[0].GetDigest() != want.GetDigest() {
		t.Fatalf("offered %v, %v", got, err)
	}
}

func TestAWorkerIsSentAllButTensorsAndFiles(t *testing.T) {
	t.Parallel()
	full := &weightsv1.WeightsManifest{
		RunId: "run-1", Version: 3, Digest: digestOf("3"), Directory: "/v3", Dtype: "float32", Bytes: 64, Form: weightsv1.WeightsForm_WEIGHTS_FORM_ADAPTER, Lineage: 1,
		Tensors: []*weightsv1.Tensor{{Name: "w", Digest: digestOf("w")}}, Files: []*weightsv1.WeightsFile{{Name: "model.safetensors", Bytes: 64}},
	}
	fields := full.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if !full.ProtoReflect().Has(fields.Get(i)) {
			t.Errorf("set %s here, and decide in withoutContents whether it is sent", fields.Get(i).Name())
		}
	}
	want := proto.CloneOf(full)
	want.Tensors, want.Files = nil, nil
	if got := withoutContents(full); !proto.Equal(want, got) {
		t.Errorf("sent %v, want %v", got, want)
	}
}
