package controller

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// prepare brings the learner to the last committed step and the workers to its weights, does what was due after that step,
// and returns it.
func (d *drive) prepare(ctx context.Context, l *learner) (uint64, error) {
	listed, err := call(ctx, d, "buffer", func(ctx context.Context) (*bufferv1.ListStepsResponse, error) {
		return d.deps.Buffer.ListSteps(ctx, &bufferv1.ListStepsRequest{RunId: d.spec.GetRunId()})
	})
	if err != nil {
		return 0, fmt.Errorf("list committed steps: %w", err)
	}
	recorded := map[uint64]*bufferv1.StepRecord{}
	for _, r := range listed.GetSteps() {
		recorded[r.GetStep()] = r
	}
	base, err := d.base(ctx)
	if err != nil {
		return 0, err
	}
	state, err := d.load(ctx, l)
	if err != nil {
		return 0, err
	}
	last := &bufferv1.StepRecord{Step: base}
	if n := len(listed.GetSteps()); n > 0 {
		last = listed.GetSteps()[n-1]
	}
	d.board.update(func(p *learnerv1.Progress) { p.Step = last.GetStep() })
	if state.GetStep() > last.GetStep() { // trained, not committed: the learner will repeat its result
		if err := d.serve(ctx); !errors.Is(err, errNowhere) { // the batch is whole without them
			return last.GetStep(), err
		}
		return last.GetStep(), nil
	}
	if last.GetStep() == base {
		return base, d.begin(ctx, l, base, state.GetWeightsDigest())
	}
	at, digest := state.GetStep(), state.GetWeightsDigest()
	if err := d.verify(ctx, recorded[at], digest); err != nil {
		return 0, err
	}
	for ; at < last.GetStep(); at++ {
		if digest, err = d.again(ctx, l, recorded[at+1]); err != nil {
			return 0, err
		}
	}
	if err := d.rearm(ctx, l, last, digest); err != nil {
		return 0, err
	}
	return at, d.settle(ctx, l, at)
}

// base is the step that the run started from.
func (d *drive) base(ctx context.Context) (uint64, error) {
	if d.spec.GetFromSnapshot() == "" {
		return 0, nil
	}
	got, err := call(ctx, d, "snapshot", func(ctx context.Context) (*snapshotv1.GetSnapshotResponse, error) {
		return d.deps.Snapshots.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: d.spec.GetFromSnapshot()})
	})
	if err != nil {
		return 0, fmt.Errorf("find the snapshot that the run starts from: %w", err)
	}
	return got.GetSnapshot().GetStep(), nil
}

// load has the learner load the newest state, unless it holds one.
func (d *drive) load(ctx context.Context, l *learner) (*learnerv1.InitializeResponse, error) {
	status, err := ask(ctx, l, func(ctx context.Context) (*learnerv1.GetLearnerStatusResponse, error) {
		return l.client.GetLearnerStatus(ctx, &learnerv1.GetLearnerStatusRequest{})
	})
	if err != nil {
		return nil, err
	}
	req := &learnerv1.InitializeRequest{RunId: d.spec.GetRunId()}
	if !status.GetInitialized() {
		if req, err = d.newest(ctx); err != nil {
			return nil, err
		}
	}
	d.waiting("%s to load the model and its state", l.worker)
	state, err := ask(ctx, l, func(ctx context.Context) (*learnerv1.InitializeResponse, error) {
		return l.client.Initialize(ctx, req)
	})
	if err != nil {
		return nil, fmt.Errorf("load the learner's state: %w", err)
	}
	crashpoint.Here("controller/loaded") // the learner stands at a state, its copy is there
	if req.StateDirectory != "" {
		_ = os.RemoveAll(req.StateDirectory) // a copy; the snapshot stays
	}
	return state, nil
}

// newest names the newest training state of the run, or the one it was restored from, written into a folder.
func (d *drive) newest(ctx context.Context) (*learnerv1.InitializeRequest, error) {
	req := &learnerv1.InitializeRequest{RunId: d.spec.GetRunId()}
	listed, err := call(ctx, d, "snapshot", func(ctx context.Context) (*snapshotv1.ListSnapshotsResponse, error) {
		return d.deps.Snapshots.ListSnapshots(ctx, &snapshotv1.ListSnapshotsRequest{
			RunId: d.spec.GetRunId(), Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, PageSize: 1,
		})
	})
	if err != nil {
		return nil, fmt.Errorf("find the newest snapshot: %w", err)
	}
	from := d.spec.GetFromSnapshot()
	if len(listed.GetSnapshots()) > 0 {
		from = listed.GetSnapshots()[0].GetSnapshotId()
	}
	if from == "" {
		return req, nil
	}
	req.StateDirectory = filepath.Join(d.spec.GetRunDirectory(), "state", "load-"+from)
	d.waiting("snapshot %s to be written out (snapshot)", from)
	made, err := call(ctx, d, "snapshot", func(ctx context.Context) (*snapshotv1.MaterializeSnapshotResponse, error) {
		return d.deps.Snapshots.MaterializeSnapshot(ctx, &snapshotv1.MaterializeSnapshotRequest{SnapshotId: from, Directory: req.StateDirectory})
	})
	if err != nil {
		return nil, fmt.Errorf("write out snapshot %s: %w", from, err)
	}
	req.Step = made.GetSnapshot().GetStep()
	return req, nil
}

// begin records and delivers the weights that the run starts from, and evaluates them.
func (d *drive) begin(ctx context.Context, l *learner, step uint64, digest string) error {
	if _, err := call(ctx, d, "buffer", func(ctx context.Context) (*bufferv1.RecordWeightsResponse, error) {
		return d.deps.Buffer.RecordWeights(ctx, &bufferv1.RecordWeightsRequest{RunId: d.spec.GetRunId(), Version: step, Digest: digest})
	}); err != nil {
		return fmt.Errorf("record the initial weights: %w", err)
	}
	crashpoint.Here("controller/recorded") // the initial digest is recorded, its weights not written
	d.board.update(func(p *learnerv1.Progress) { p.Step = step })
	weights, err := d.publish(ctx, l)
	if err != nil {
		return err
	}
	d.hold(weights)
	if _, err := d.deliver(ctx, weights); err != nil {
		return err
	}
	if d.set.cfg.GetEval().GetEverySteps() == 0 {
		return nil
	}
	return d.evaluate(ctx, l, step)
}

// again trains on a committed batch once more and returns the digest that came out.
func (d *drive) again(ctx context.Context, l *learner, r *bufferv1.StepRecord) (string, error) {
	d.waiting("%s to train on the recorded batch of step %d again", l.worker, r.GetStep())
	got, err := call(ctx, d, "buffer", func(ctx context.Context) (*bufferv1.GetBatchResponse, error) {
		return d.deps.Buffer.GetBatch(ctx, &bufferv1.GetBatchRequest{RunId: d.spec.GetRunId(), Step: r.GetStep()})
	})
	if err != nil {
		return "", fmt.Errorf("read the recorded batch of step %d: %w", r.GetStep(), err)
	}
	result, err := d.train(ctx, l, got.GetBatch())
	if err != nil {
		return "", err
	}
	if err := d.verify(ctx, r, result.GetWeightsDigest()); err != nil {
		return "", err
	}
	// The process that committed the step may have died before it told of it.
	d.emitStep(got.GetBatch(), result, map[string]float64{})
	return result.GetWeightsDigest(), nil
}

// verify compares weights that were made again with the recorded ones. r may be nil: nothing is recorded of a state
// that no step of this run made.
func (d *drive) verify(ctx context.Context, r *bufferv1.StepRecord, digest string) error {
	if r == nil || r.GetWeightsDigest() == digest {
		return nil
	}
	err := fmt.Errorf("step %d: recorded %s, made again %s: %w", r.GetStep(), r.GetWeightsDigest(), digest, ErrDiverged)
	if d.set.deterministic {
		return err
	}
	d.log.WarnContext(ctx, "the run is not deterministic: a step made again gave other weights; the ledger keeps the first",
		"step", r.GetStep(), "recorded", r.GetWeightsDigest(), "again", digest)
	return nil
}

// rearm delivers the weights of the last committed step. The learner publishes them again where it holds exactly them, also where their
// folder is still there: this learner may be another one than wrote it, and has nothing to offer to who can't open it. Else the
// folder that was delivered first serves, and where that is gone too the run can't go on: the ledger would refuse what other weights
// sample.
func (d *drive) rearm(ctx context.Context, l *learner, last *bufferv1.StepRecord, digest string) error {
	if digest != last.GetWeightsDigest() {
		return d.rearmFirst(ctx, last)
	}
	weights, err := d.publish(ctx, l)
	if err != nil {
		return err
	}
	d.hold(weights)
	_, err = d.deliver(ctx, weights)
	return err
}

// rearmFirst delivers the weights that a committed step gave when it was made first.
func (d *drive) rearmFirst(ctx context.Context, last *bufferv1.StepRecord) error {
	first, err := d.delivered(last), errNowhere
	if !missing(first) {
		d.hold(first)
		err = d.serve(ctx)
	}
	switch {
	case !errors.Is(err, errNowhere):
		return err
	case algorithm.FromData(d.set.cfg):
		return nil // nobody samples with them
	}
	return fmt.Errorf("step %d: its weights %s are gone and were not made again; `rollout run --from %s` goes on in a new run, from the newest snapshot: %w",
		last.GetStep(), last.GetWeightsDigest(), d.spec.GetRunId(), ErrDiverged)
}

// delivered names the folder in which the weights of a committed step were published.
func (d *drive) delivered(r *bufferv1.StepRecord) *weightsv1.WeightsManifest {
	if d.weights.GetVersion() == r.GetStep() && d.weights.GetDigest() == r.GetWeightsDigest() {
		return d.weights
	}
	return &weightsv1.WeightsManifest{
		RunId: d.spec.GetRunId(), Version: r.GetStep(), Digest: r.GetWeightsDigest(),
		Directory: filepath.Join(d.spec.GetRunDirectory(), "weights", fmt.Sprintf("v%06d", r.GetStep())),
	}
}

// serve lets workers go on with the weights that were published last. Where their folder is gone, those that come up wait
// for the next step's.
func (d *drive) serve(ctx context.Context) error {
	if d.weights == nil || missing(d.weights) {
		return nil
	}
	_, err := d.deliver(ctx, d.weights)
	return err
}

func missing(w *weightsv1.WeightsManifest) bool {
	_, err := os.Stat(w.GetDirectory())
	return errors.Is(err, os.ErrNotExist)
}

// publish has the learner write the weights of its current step.
func (d *drive) publish(ctx context.Context, l *learner) (*weightsv1.WeightsManifest, error) {
	published, err := ask(ctx, l, func(ctx context.Context) (*learnerv1.PublishWeightsResponse, error) {
		return l.client.PublishWeights(ctx, &learnerv1.PublishWeightsRequest{RunId: d.spec.GetRunId()})
	})
	if err != nil {
		return nil, fmt.Errorf("publish weights: %w", err)
	}
	return published.GetWeights(), nil
}

// hold makes w the newest published weights.
func (d *drive) hold(w *weightsv1.WeightsManifest) {
	d.weights = w
	d.board.update(func(p *learnerv1.Progress) { p.Weights = w })
}

// since is the seconds since t.
func (d *drive) since(t time.Time) float64 { return d.deps.Now().Sub(t).Seconds() }
