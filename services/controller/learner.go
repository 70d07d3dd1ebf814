package controller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/worker"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// errLost reports that the learner is gone. Another learner has to load its state.
var errLost = errors.New("the learner was lost")

// errNoSource reports that no process has the published weights, as after a lost learner.
var errNoSource = fmt.Errorf("%w: no process has its weights", errLost)

// learner is a connection to the learner worker of a run. Its methods return errLost when the
// connection breaks.
type learner struct {
	client learnerv1.LearnerWorkerServiceClient
	conn   Conn

	runID, worker, address, process string
}

// is reports whether a registration is that of this learner.
func (l *learner) is(in discovery.Instance) bool {
	return in.Address == l.address && in.Meta["process"] == l.process
}

// initialized reports whether the learner has loaded a state.
func (l *learner) initialized(ctx context.Context) (bool, error) {
	status, err := ask(ctx, l, l.client.GetLearnerStatus, &learnerv1.GetLearnerStatusRequest{})
	return status.GetInitialized(), err
}

// initialize loads a state from a folder; empty for the model itself. A learner that has a state
// keeps and returns it.
func (l *learner) initialize(ctx context.Context, step uint64, directory string) (*learnerv1.InitializeResponse, error) {
	state, err := ask(ctx, l, l.client.Initialize, &learnerv1.InitializeRequest{RunId: l.runID, Step: step, StateDirectory: directory})
	if err != nil {
		return nil, fmt.Errorf("load the learner's state: %w", err)
	}
	return state, nil
}

// replace loads a state from a folder instead of the one that the learner has, as the state of a
// step.
func (l *learner) replace(ctx context.Context, step uint64, directory string) (*learnerv1.InitializeResponse, error) {
	state, err := ask(ctx, l, l.client.Initialize, &learnerv1.InitializeRequest{RunId: l.runID, Step: step, StateDirectory: directory, Replace: true})
	if err != nil {
		return nil, fmt.Errorf("restore the learner's state: %w", err)
	}
	return state, nil
}

// train makes a step and reports its progress.
func (l *learner) train(ctx context.Context, batch *bufferv1.Batch, publish bool, p *progress) (*learnerv1.TrainResult, error) {
	step := batch.GetStep()
	stream, err := l.client.Train(ctx, &learnerv1.TrainRequest{RunId: l.runID, Step: step, Batch: batch, Publish: publish})
	if err != nil {
		return nil, fmt.Errorf("train step %d: %w", step, l.lost(ctx, err))
	}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("train step %d: %w: the stream ended without a result", step, errLost)
		}
		if err != nil {
			return nil, fmt.Errorf("train step %d: %w", step, l.lost(ctx, err))
		}
		if result := message.GetResult(); result != nil {
			return result, nil
		}
		done := message.GetProgress()
		p.waitFor(work(fmt.Sprintf("to train: %d of %d micro-batches of step %d are done", done.GetDone(), done.GetTotal(), step), l.worker))
	}
}

// nextWeights names the write in what people read.
const nextWeights = "the next version of the weights"

// publish writes the weights of the learner's current step, and waits for space on the disk.
func (l *learner) publish(ctx context.Context, r *room) (*weightsv1.WeightsManifest, error) {
	published, err := repeat(ctx, r, 0, nextWeights, func() (*learnerv1.PublishWeightsResponse, error) {
		return ask(ctx, l, l.client.PublishWeights, &learnerv1.PublishWeightsRequest{RunId: l.runID})
	})
	if err != nil {
		return nil, fmt.Errorf("publish weights: %w", err)
	}
	return published.GetWeights(), nil
}

// copy has the learner copy the training state of a step in memory, and write the copy into a
// folder while it trains. save waits for that.
func (l *learner) copy(ctx context.Context, step uint64, directory string) error {
	_, err := ask(ctx, l, l.client.SaveState, &learnerv1.SaveStateRequest{RunId: l.runID, Step: step, Directory: directory, Copied: true})
	if err != nil {
		return fmt.Errorf("copy the state of step %d: %w", step, err)
	}
	return nil
}

// save writes the training state of a step into a folder.
func (l *learner) save(ctx context.Context, step uint64, directory string) (*learnerv1.SaveStateResponse, error) {
	saved, err := ask(ctx, l, l.client.SaveState, &learnerv1.SaveStateRequest{RunId: l.runID, Step: step, Directory: directory})
	if err != nil {
		return nil, fmt.Errorf("save the state of step %d: %w", step, err)
	}
	return saved, nil
}

// evaluateLoss computes the loss of the held-out rows.
func (l *learner) evaluateLoss(ctx context.Context, step uint64) (*learnerv1.EvaluateLossResponse, error) {
	got, err := ask(ctx, l, l.client.EvaluateLoss, &learnerv1.EvaluateLossRequest{RunId: l.runID, Step: step})
	if err != nil {
		return nil, fmt.Errorf("evaluate step %d: %w", step, err)
	}
	return got, nil
}

// ask calls the learner.
func ask[Req, Resp any](ctx context.Context, l *learner, rpc func(context.Context, *Req, ...grpc.CallOption) (*Resp, error), req *Req) (*Resp, error) {
	resp, err := rpc(ctx, req)
	return resp, l.lost(ctx, err)
}

// lost turns the error of a broken connection into errLost. A learner whose disk is full is not
// lost.
func (l *learner) lost(ctx context.Context, err error) error {
	if err != nil && ctx.Err() == nil && transient(err) && !rpcerr.DiskFull(err) {
		return fmt.Errorf("%w: %s: %w", errLost, l.worker, err)
	}
	return err
}

// learners is the newest list of the learner workers of a run. One goroutine at a time uses it.
type learners struct {
	runID   string
	updates <-chan []discovery.Instance
	list    []discovery.Instance
}

// wait waits for a change of the list, at most for d.
func (l *learners) wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case list, ok := <-l.updates:
		if ok {
			l.list = list
		}
	}
}

// connect waits until a learner of this incarnation answers.
func (l *learners) connect(ctx context.Context, dial func(run string, incarnation uint32, address string) (Conn, error), pause *backoff) (*learner, error) {
	for {
		for _, in := range l.list {
			conn, err := dial(l.runID, worker.IncarnationOf(in), in.Address)
			if err != nil {
				continue
			}
			found := &learner{
				client: learnerv1.NewLearnerWorkerServiceClient(conn), conn: conn,
				runID: l.runID, worker: in.Meta["worker"], address: in.Address, process: in.Meta["process"],
			}
			if _, err := found.client.GetLearnerStatus(ctx, &learnerv1.GetLearnerStatusRequest{}); err == nil {
				return found, nil
			}
			_ = conn.Close()
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		l.wait(ctx, pause.next())
	}
}

// guard returns a context that ends, with errLost as its cause, when another process is registered
// in the place of current. A drive mostly waits for processes other than the learner, and would
// wait forever if they need weights that only the lost learner had. guard uses the list until end
// is called.
func (l *learners) guard(ctx context.Context, current *learner) (guarded context.Context, end func()) {
	guarded, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			if len(l.list) > 0 && !slices.ContainsFunc(l.list, current.is) {
				cancel(fmt.Errorf("%w: another process is registered as %s", errLost, current.worker))
				return
			}
			select {
			case <-guarded.Done():
				return
			case list, ok := <-l.updates:
				if !ok {
					return
				}
				l.list = list
			}
		}
	})
	return guarded, func() { cancel(nil); wg.Wait() }
}
