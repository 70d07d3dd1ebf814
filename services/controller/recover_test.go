package controller

import (
	"context"
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

// The weights of the last step were not published, so they are neither compared nor delivered. The
// ones that the workers had before are delivered again; without them, those of the last step.
func TestRecoveryAtAStepWithoutADigest(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	l := &publishing{weights: &weightsv1.WeightsManifest{Version: 30, Digest: digestOf("of the learner"), Directory: folder}}
	last := &bufferv1.StepRecord{Step: 30, Chain: "c"}
	r := recovered(l, folder, &weightsv1.WeightsManifest{Version: 28, Digest: digestOf("older"), Directory: folder})
	if err := r.verify(t.Context(), last, digestOf("of the snapshot")); err != nil {
		t.Error(err)
	}
	if err := r.redeliver(t.Context(), last, digestOf("of the snapshot")); err != nil || l.asked != 0 || r.delivery.fleet.want.GetVersion() != 28 {
		t.Errorf("%d publications, the workers should load version 28, not %v: %v", l.asked, r.delivery.fleet.want, err)
	}
	w := newWorld(t)
	w.steps = make([]*bufferv1.StepRecord, 30)
	w.steps[29] = last
	r = recovered(l, folder, nil)
	r.ledger = &ledger{settings: r.settings, buffer: w, retries: retries{first: time.Millisecond, progress: r.delivery.progress, room: r.room}}
	if err := r.redeliver(t.Context(), last, digestOf("of the snapshot")); err != nil || l.asked != 1 || r.delivery.fleet.want.GetVersion() != 30 {
		t.Errorf("%d publications, the workers should load version 30, not %v: %v", l.asked, r.delivery.fleet.want, err)
	}
	if w.retrained[30] != digestOf("of the learner") {
		t.Errorf("the ledger records %v", w.retrained)
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
