package controller

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

type publishing struct {
	learnerv1.LearnerWorkerServiceClient
	weights *weightsv1.WeightsManifest
	asked   int
}

func (p *publishing) PublishWeights(context.Context, *learnerv1.PublishWeightsRequest, ...grpc.CallOption) (*learnerv1.PublishWeightsResponse, error) {
	p.asked++
	return &learnerv1.PublishWeightsResponse{Weights: p.weights}, nil
}

// If retraining gave different weights, the ones that were delivered first are delivered again.
// Without them the run fails at once.
func TestRecoveryWithOtherWeightsServesTheFirstOrEnds(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	l := &publishing{}
	r := recovered(l, folder, &weightsv1.WeightsManifest{Version: 29, Digest: digestOf("older"), Directory: folder})
	last := &bufferv1.StepRecord{Step: 30, WeightsDigest: digestOf("first")}
	err := r.redeliver(t.Context(), last, digestOf("again"))
	if !errors.Is(err, ErrDiverged) || !strings.Contains(err.Error(), "rollout run --config FILE --from "+run+" --continue") {
		t.Fatalf("got %v", err)
	}
	first := filepath.Join(folder, "weights", "v000030")
	if err := os.MkdirAll(first, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := r.redeliver(t.Context(), last, digestOf("again")); err != nil {
		t.Fatal(err)
	}
	if w := r.delivery.fleet.want; w.GetVersion() != 30 || w.GetDigest() != last.GetWeightsDigest() || w.GetDirectory() != first || l.asked != 0 {
		t.Fatalf("the workers should load %v; %d publications", w, l.asked)
	}
}

// The weights of the last step were not published, so they are neither compared nor delivered. The
// ones that the workers had before are delivered again.
func TestRecoveryAtAStepWithoutADigest(t *testing.T) {
	t.Parallel()
	l := &publishing{}
	r := recovered(l, t.TempDir(), nil)
	last := &bufferv1.StepRecord{Step: 30, Chain: "c"}
	if err := r.verify(t.Context(), last, digestOf("of the snapshot")); err != nil {
		t.Error(err)
	}
	if err := r.redeliver(t.Context(), last, digestOf("of the snapshot")); err != nil || l.asked != 0 || r.delivery.fleet.want != nil {
		t.Errorf("%d publications, the workers should load %v: %v", l.asked, r.delivery.fleet.want, err)
	}
	folder := t.TempDir()
	r = recovered(l, folder, &weightsv1.WeightsManifest{Version: 28, Digest: digestOf("older"), Directory: folder})
	if err := r.redeliver(t.Context(), last, digestOf("of the snapshot")); err != nil || l.asked != 0 || r.delivery.fleet.want.GetVersion() != 28 {
		t.Errorf("%d publications, the workers should load version 28, not %v: %v", l.asked, r.delivery.fleet.want, err)
	}
}

// recovered is the recovery of a run without workers whose newest weights are given.
func recovered(l *publishing, folder string, newest *weightsv1.WeightsManifest) *recovery {
	set := settings{runID: run, incarnation: 1, directory: folder}
	events := &reporter{settings: set, bus: &warnings{}, now: time.Now}
	progress := newProgress(events, &learnerv1.Progress{})
	return &recovery{
		settings: set, learner: &learner{client: l, worker: "learner-0"}, room: &room{progress: progress},
		delivery: &delivery{
			settings: set, fleet: newFleet(set, nil, time.Second, nil), progress: progress, events: events, now: time.Now, newest: newest,
		},
	}
}

// A step without a gradient does not change the digest. After a kill between its commit and its
// delivery, the run continues with the version of the step, which the next prompts require, and not
// with the version of the step before.
func TestRecoveryDeliversTheVersionNotTheDigest(t *testing.T) {
	t.Parallel()
	folder, digest := t.TempDir(), digestOf("same")
	l := &publishing{weights: &weightsv1.WeightsManifest{Version: 30, Digest: digest, Directory: folder}}
	r := recovered(l, folder, &weightsv1.WeightsManifest{Version: 29, Digest: digest, Directory: folder})
	last := &bufferv1.StepRecord{Step: 30, WeightsDigest: digest}
	for range 2 { // the second time they are published already, perhaps by another learner
		if err := r.redeliver(t.Context(), last, digest); err != nil {
			t.Fatal(err)
		}
		if r.delivery.newest.GetVersion() != 30 || r.delivery.fleet.want.GetVersion() != 30 {
			t.Fatalf("the run continues with version %d, and its workers should load %d", r.delivery.newest.GetVersion(), r.delivery.fleet.want.GetVersion())
		}
	}
	if l.asked != 2 {
		t.Errorf("the weights were published %d times, want 2", l.asked)
	}
}
