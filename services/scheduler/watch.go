package scheduler

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/wait"
	"github.com/rollout-rl/rollout/libs/worker"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

const (
	watchGap    = 200 * time.Millisecond // between two messages to a watcher, unless the state changed
	pollEvery   = time.Second            // of the inference workers while a run is watched
	pollTimeout = 500 * time.Millisecond // of all calls of one poll
)

// watcher answers questions about the status of runs.
type watcher struct {
	store      Store
	conductors *conductors
}

// status is the status of a run now. With fresh, its inference workers are asked first; with
// inFlight, every worker is asked what it does.
func (w *watcher) status(ctx context.Context, run *Run, fresh, inFlight bool) (*runv1.RunStatus, error) {
	if c := w.conductors.get(run.GetRunId()); c != nil {
		if fresh {
			c.poller.poll(ctx)
		}
		status := c.board.status()
		if inFlight {
			c.poller.inspect(ctx, status)
		}
		return status, nil
	}
	cursor, err := w.store.Cursor(ctx, run.GetRunId())
	if err != nil {
		return nil, err
	}
	queues, err := w.store.Queues(ctx, run.GetRunId())
	if err != nil {
		return nil, err
	}
	status := &runv1.RunStatus{Run: run, Queues: queues}
	if data, err := trainData(run); err == nil {
		status.Cursor = cursorMessage(cursor.Position, data.Rows)
	}
	if refusal.Paused(run) {
		status.WaitingFor, status.Waits = waitsForUser(run), (&view{run: run}).currentWaits()
	}
	return status, nil
}

// watch sends the status at once and on every change until the run has ended or ctx ends.
func (w *watcher) watch(ctx context.Context, runID string, send func(*runv1.RunStatus) error) error {
	var last *runv1.RunStatus
	for {
		run, err := w.store.Get(ctx, runID)
		if err != nil {
			return err
		}
		c := w.conductors.get(runID)
		if c == nil || ended(run.GetState()) {
			// Read the record again: the conductor may have ended between the two reads.
			if run, err = w.store.Get(ctx, runID); err != nil {
				return err
			}
			if ended(run.GetState()) {
				_, err = w.sendRecord(ctx, run, last, send)
				return err
			}
			if refusal.Paused(run) { // also after a restart, until it is resumed by request
				if last, err = w.sendRecord(ctx, run, last, send); err != nil {
					return err
				}
			}
			if err := retry.Sleep(ctx, watchGap); err != nil {
				return err
			}
			continue
		}
		if last, err = w.follow(ctx, c, last, send); err != nil {
			return err
		}
	}
}

// sendRecord sends the recorded status of a run that is not active here, unless it was sent last.
// It returns what was sent last.
func (w *watcher) sendRecord(ctx context.Context, run *Run, last *runv1.RunStatus, send func(*runv1.RunStatus) error) (*runv1.RunStatus, error) {
	status, err := w.status(ctx, run, false, false)
	if err != nil || proto.Equal(status, last) {
		return last, err
	}
	return status, send(status)
}

// follow watches one conductor until it is done. It returns what was sent last.
func (w *watcher) follow(ctx context.Context, c *conductor, last *runv1.RunStatus, send func(*runv1.RunStatus) error) (*runv1.RunStatus, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var polling sync.WaitGroup
	defer polling.Wait()
	defer cancel()
	polling.Go(func() { c.poller.serve(ctx) })
	for {
		changed := c.board.Changes()
		status := c.board.status()
		if ended(status.GetRun().GetState()) { // watch sends the last status from the store
			select {
			case <-c.done:
				return last, nil
			case <-ctx.Done():
				return last, ctx.Err()
			}
		}
		if !proto.Equal(status, last) {
			if err := send(status); err != nil {
				return last, err
			}
			last = status
		}
		if err := w.rest(ctx, c, status.GetRun().GetState()); err != nil {
			return last, err
		}
		select {
		case <-ctx.Done():
			return last, ctx.Err()
		case <-c.done:
			return last, nil
		case <-changed:
		}
	}
}

// rest waits for watchGap, or until the state changes.
func (w *watcher) rest(ctx context.Context, c *conductor, was State) error {
	timer := time.NewTimer(watchGap)
	defer timer.Stop()
	for {
		changed := c.board.Changes()
		if c.board.State() != was {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			return nil
		case <-c.done:
			return nil
		case <-changed:
		}
	}
}

// poller asks the inference workers of a run for their activity. Safe for concurrent use: watchers
// share one answer per pollEvery.
type poller struct {
	*scope

	mu     sync.Mutex
	last   time.Time
	conns  map[string]Conn // by address, kept from one poll to the next
	closed bool
}

func newPoller(s *scope) *poller { return &poller{scope: s, conns: map[string]Conn{}} }

// serve polls until ctx ends.
func (p *poller) serve(ctx context.Context) {
	for {
		p.poll(ctx)
		if err := retry.Sleep(ctx, pollEvery); err != nil {
			return
		}
	}
}

// poll asks the healthy inference workers in parallel.
func (p *poller) poll(ctx context.Context) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || time.Since(p.last) < pollEvery*9/10 {
		return
	}
	p.last = time.Now()
	away := ""
	if !p.Bus.Healthy() { // every other wait may follow from this one: work and samples travel over NATS
		away = "no server of nats.url answers (" + nameSome(p.Bus.Servers()) + ")"
	}
	p.board.WaitFor(retry.Awaited{Owner: wait.NATS, What: "NATS to answer again (its servers)"}, away)
	workers := p.board.workers()
	ctx, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	p.closeOthers(workers)
	var wg sync.WaitGroup
	for id, w := range workers {
		if w.kind != worker.Inference.Name || !w.healthy() {
			continue
		}
		conn, err := p.connect(w.address)
		if err != nil {
			continue
		}
		wg.Go(func() {
			status, err := inferencev1.NewInferenceWorkerServiceClient(conn).GetInferenceStatus(ctx, &inferencev1.GetInferenceStatusRequest{})
			if err != nil {
				return // the registry reports soon whether it is gone
			}
			p.board.changeWorker(id, func(now *workerView) {
				if now.process == w.process {
					now.status = status
				}
			})
		})
	}
	wg.Wait()
}

func (p *poller) connect(address string) (Conn, error) {
	if conn, open := p.conns[address]; open {
		return conn, nil
	}
	conn, err := p.Dial(p.run, p.incarnation, address)
	if err == nil {
		p.conns[address] = conn
	}
	return conn, err
}

// closeOthers closes the connections to all but these workers.
func (p *poller) closeOthers(workers map[string]workerView) {
	wanted := map[string]bool{}
	for _, w := range workers {
		wanted[w.address] = true
	}
	for address, conn := range p.conns {
		if !wanted[address] {
			_ = conn.Close()
			delete(p.conns, address)
		}
	}
}

// close closes all connections; later polls do nothing.
func (p *poller) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.closeOthers(nil)
}
