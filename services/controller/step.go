package controller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

var tracer = otel.Tracer("github.com/rollout-rl/rollout/services/controller")

// step makes one step: lease, train, commit, deliver, and what is due after it.
func (d *drive) step(ctx context.Context, l *learner, step uint64) error {
	ctx, span := tracer.Start(ctx, "step", trace.WithAttributes(attribute.String("run", d.spec.GetRunId()), attribute.Int64("step", int64(step))))
	defer span.End()
	began := d.deps.Now()
	times := map[string]float64{"time/deliver": d.delivery}
	if d.mark.IsZero() {
		d.mark = began
	}
	lap := func(name string, from time.Time) { times["time/"+name] = d.since(from) }

	d.enter(leasing, "")
	batch, err := d.lease(ctx, step)
	if err != nil {
		return err
	}
	if len(batch.GetSamples()) == 0 {
		return fmt.Errorf("step %d: %w; `rollout logs tail %s --kind group.excluded` tells why", step, ErrNothingLeft, d.spec.GetRunId())
	}
	lap("lease", began)
	crashpoint.Here("controller/leased") // the batch is leased, the learner does not know
	from := d.deps.Now()
	d.enter(training, "")
	retries := make(chan uint64, 1) // of the reward while the batch was sampled; asked while the learner works
	if d.set.cfg.GetReward() != nil {
		go func() { retries <- d.fleet.rewardRetries(ctx) }()
	} else {
		close(retries)
	}
	result, err := d.train(ctx, l, batch)
	repeated := <-retries
	if err != nil {
		return err
	}
	lap("train", from)
	crashpoint.Here("controller/trained") // the step is made, not committed
	from = d.deps.Now()
	weights, err := d.written(ctx, l, result)
	if err != nil {
		return err
	}
	if weights != nil && d.set.generates() {
		// Beside the commit, so that sampling goes on: what these weights sample waits in the ledger until they are recorded.
		d.fleet.aim(weights)
		crashpoint.Here("controller/aimed") // workers may sample with the new weights, the step is not committed
	}
	d.enter(committing, "buffer")
	if err := d.commit(ctx, batch, result); err != nil {
		return err
	}
	crashpoint.Here("controller/committed") // the step exists, nobody was told
	lap("commit", from)
	lap("step", d.mark)
	d.mark = d.deps.Now()
	if d.set.cfg.GetReward() != nil {
		times["reward/retries"] = float64(repeated)
	}
	d.emitCompletions(result)
	d.emitStep(batch, result, times)
	if weights != nil {
		d.hold(weights)
		if _, err := d.deliver(ctx, weights); err != nil {
			return err
		}
		crashpoint.Here("controller/delivered") // the fleet holds the new weights, the drive names the old ones
		d.delivery = d.since(d.mark)
		if d.save(ctx, true) {
			return errTaken
		}
		crashpoint.Here("controller/held")
	}
	return d.settle(ctx, l, step)
}

// settle does what is due after a committed step. Doing it twice is fine.
func (d *drive) settle(ctx context.Context, l *learner, step uint64) error {
	if d.set.evaluates(step) {
		if err := d.evaluate(ctx, l, step); err != nil {
			return err
		}
	}
	if d.set.snapshots(step) {
		if err := d.snapshot(ctx, l, step); err != nil {
			return err
		}
	}
	if d.set.evaluates(step) || d.set.snapshots(step) {
		d.mark = time.Time{} // they are no part of a step's time
	}
	return nil
}

// lease waits for the batch of a step. errDrained where a drain was asked for meanwhile.
func (d *drive) lease(ctx context.Context, step uint64) (*bufferv1.Batch, error) {
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-d.drain:
			cancel()
		case <-waiting.Done():
		}
	}()
	for {
		got, err := call(waiting, d, "buffer", func(ctx context.Context) (*bufferv1.LeaseBatchResponse, error) {
			return d.deps.Buffer.LeaseBatch(ctx, &bufferv1.LeaseBatchRequest{
				RunId: d.spec.GetRunId(), Step: step, WaitSeconds: d.cfg.LeaseWait.Seconds(),
			})
		})
		switch {
		case err != nil && ctx.Err() == nil && d.draining():
			return nil, errDrained
		case err != nil:
			return nil, fmt.Errorf("lease the batch of step %d: %w", step, err)
		case got.GetBatch() != nil:
			return got.GetBatch(), nil
		}
		if err := d.fleet.lost(d.weights); err != nil { // nobody will sample what is missing
			return nil, err
		}
		d.waiting("%s", got.GetWaitingFor())
	}
}

// train has the learner make a step and follows its progress.
func (d *drive) train(ctx context.Context, l *learner, batch *bufferv1.Batch) (*learnerv1.TrainResult, error) {
	stream, err := ask(ctx, l, func(ctx context.Context) (learnerv1.LearnerWorkerService_TrainClient, error) {
		return l.client.Train(ctx, &learnerv1.TrainRequest{
			RunId: d.spec.GetRunId(), Step: batch.GetStep(), Batch: batch, Publish: d.set.delivers(batch.GetStep()),
		})
	})
	if err != nil {
		return nil, fmt.Errorf("train step %d: %w", batch.GetStep(), err)
	}
	for {
		piece, err := ask(ctx, l, func(context.Context) (*learnerv1.TrainResponse, error) { return stream.Recv() })
		if errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("train step %d: %w: the stream ended without a result", batch.GetStep(), errLost)
		}
		if err != nil {
			return nil, fmt.Errorf("train step %d: %w", batch.GetStep(), err)
		}
		if result := piece.GetResult(); result != nil {
			return result, nil
		}
		d.waiting("%s: %d of %d micro-batches of step %d", l.worker, piece.GetProgress().GetDone(), piece.GetProgress().GetTotal(), batch.GetStep())
	}
}

// commit makes the step exist.
func (d *drive) commit(ctx context.Context, batch *bufferv1.Batch, result *learnerv1.TrainResult) error {
	if _, err := call(ctx, d, "buffer", func(ctx context.Context) (*bufferv1.CommitStepResponse, error) {
		return d.deps.Buffer.CommitStep(ctx, &bufferv1.CommitStepRequest{
			RunId: d.spec.GetRunId(), Step: batch.GetStep(), BatchId: batch.GetBatchId(), WeightsDigest: result.GetWeightsDigest(),
		})
	}); err != nil {
		return fmt.Errorf("commit step %d: %w", batch.GetStep(), err)
	}
	d.board.update(func(p *learnerv1.Progress) { p.Step = batch.GetStep() })
	return nil
}

// written is the manifest of the weights of the step that the learner made; nil where they are not delivered.
func (d *drive) written(ctx context.Context, l *learner, result *learnerv1.TrainResult) (*weightsv1.WeightsManifest, error) {
	if !d.set.delivers(result.GetStep()) {
		return nil, nil
	}
	weights := result.GetWeights()
	if weights == nil {
		var err error
		if weights, err = d.publish(ctx, l); err != nil {
			return nil, err
		}
	}
	if weights.GetDigest() != result.GetWeightsDigest() {
		return nil, fmt.Errorf("publish step %d: the learner made %s and wrote %s: %w", result.GetStep(), result.GetWeightsDigest(), weights.GetDigest(), ErrDiverged)
	}
	return weights, nil
}

// deliver moves the inference workers to w and returns how many hold it.
func (d *drive) deliver(ctx context.Context, w *weightsv1.WeightsManifest) (int, error) {
	if !d.set.generates() {
		return 0, nil
	}
	from := d.deps.Now()
	d.enter(delivering, "")
	workers, err := d.fleet.deliver(ctx, w, func(who, hindered string) {
		d.waiting("%s to load weights version %d%s", who, w.GetVersion(), hindered)
	})
	if err != nil {
		return workers, fmt.Errorf("deliver weights version %d: %w", w.GetVersion(), err)
	}
	d.emitDelivered(w, workers, d.since(from))
	return workers, nil
}

// metrics joins what the learner says of a step with what the controller measured.
func metrics(result *learnerv1.TrainResult, times map[string]float64, samples int) map[string]float64 {
	all := maps.Clone(result.GetMetrics())
	if all == nil {
		all = map[string]float64{}
	}
	maps.Copy(all, times)
	all["samples"] = float64(samples)
	if seconds := times["time/step"]; seconds > 0 {
		all["samples_per_second"] = float64(samples) / seconds
		if tokens, ok := all["tokens"]; ok {
			all["tokens_per_second"] = tokens / seconds
		}
	}
	return all
}
