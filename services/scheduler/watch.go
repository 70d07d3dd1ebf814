package scheduler

import (
	"context"
	"maps"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/worker"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

const (
	watchGap   = 200 * time.Millisecond // between two messages to a watcher, unless the state changed
	pollEvery  = time.Second            // of the inference workers while somebody watches
	pollAtMost = 500 * time.Millisecond // for one of their answers
)

// status is what is known of a run now. With fresh, inference workers are asked first.
func (s *service) status(ctx context.Context, run *Run, fresh bool) (*runv1.RunStatus, error) {
	if c := s.conductor(run.GetRunId()); c != nil {
		if fresh {
			c.poll(ctx)
		}
		return c.status(), nil
	}
	cursor, err := s.Store.Cursor(ctx, run.GetRunId())
	if err != nil {
		return nil, err
	}
	queues, err := s.Store.Queues(ctx, run.GetRunId())
	if err != nil {
		return nil, err
	}
	status := &runv1.RunStatus{Run: run, Queues: queues}
	if data, err := trainData(run); err == nil {
		status.Cursor = cursorMessage(cursor.Position, data.rows)
	}
	if refusal.Paused(run) {
		status.WaitingFor, status.Waits = waitsForSomebody(run), (&view{run: run}).currentWaits()
	}
	return status, nil
}

// watch sends the status at once and on every change until the run has ended or ctx ends.
func (s *service) watch(ctx context.Context, runID string, send func(*runv1.RunStatus) error) error {
	var last *runv1.RunStatus
	for {
		run, err := s.Store.Get(ctx, runID)
		if err != nil {
			return err
		}
		c := s.conductor(runID)
		if c == nil || ended(run.GetState()) {
			// The record is read again: between the two looks the conductor may have come to its end.
			if run, err = s.Store.Get(ctx, runID); err != nil {
				return err
			}
			if ended(run.GetState()) {
				_, err = s.sendRecord(ctx, run, last, send)
				return err
			}
			if refusal.Paused(run) { // over a restart, until somebody resumes it
				if last, err = s.sendRecord(ctx, run, last, send); err != nil {
					return err
				}
			}
			if err := pause(ctx, watchGap); err != nil {
				return err
			}
			continue
		}
		if last, err = c.watch(ctx, last, send); err != nil {
			return err
		}
	}
}

// sendRecord sends what is recorded of a run that nobody conducts, unless that was sent last; it returns what was.
func (s *service) sendRecord(ctx context.Context, run *Run, last *runv1.RunStatus, send func(*runv1.RunStatus) error) (*runv1.RunStatus, error) {
	status, err := s.status(ctx, run, false)
	if err != nil || proto.Equal(status, last) {
		return last, err
	}
	return status, send(status)
}

// watch follows one conductor until it is done; it returns what was sent last.
func (c *conductor) watch(ctx context.Context, last *runv1.RunStatus, send func(*runv1.RunStatus) error) (*runv1.RunStatus, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var polling sync.WaitGroup
	defer polling.Wait()
	defer cancel()
	polling.Go(func() { c.pollUntil(ctx) })
	for {
		changed := c.changes()
		status := c.status()
		if ended(status.GetRun().GetState()) { // the caller sends the last from the store
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
		if err := c.rest(ctx, status.GetRun().GetState()); err != nil {
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

// rest waits for watchGap, but not past a change of state.
func (c *conductor) rest(ctx context.Context, was State) error {
	timer := time.NewTimer(watchGap)
	defer timer.Stop()
	for {
		changed := c.changes()
		if c.state() != was {
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

func (c *conductor) status() *runv1.RunStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view.status()
}

func (c *conductor) pollUntil(ctx context.Context) {
	for {
		c.poll(ctx)
		if err := pause(ctx, pollEvery); err != nil {
			return
		}
	}
}

// poll asks the healthy inference workers what they do, in parallel and briefly. Several watchers share one answer a second.
func (c *conductor) poll(ctx context.Context) {
	c.polls.Lock()
	defer c.polls.Unlock()
	if time.Since(c.polled) < pollEvery*9/10 {
		return
	}
	c.polled = time.Now()
	away := ""
	if !c.svc.Bus.Healthy() {
		away = "no server of nats.url does; `rollout doctor` says more" // work and samples travel there: whatever else is waited for, waits for it
	}
	c.waitFor("NATS to answer again (its servers)", away)
	c.mu.Lock()
	workers := maps.Clone(c.view.crowd.workers)
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, pollAtMost)
	defer cancel()
	c.lines.keep(workers)
	var wg sync.WaitGroup
	for id, w := range workers {
		if w.kind != worker.Inference.Name || !w.healthy() {
			continue
		}
		wg.Go(func() {
			status, err := c.ask(ctx, w.address)
			if err != nil {
				return // the registry says soon whether it is gone
			}
			c.change(id, func(now *workerView) {
				if now.process == w.process {
					now.status = status
				}
			})
		})
	}
	wg.Wait()
}

func (c *conductor) ask(ctx context.Context, address string) (*inferencev1.GetInferenceStatusResponse, error) {
	conn, err := c.lines.to(address, c.svc.Dial)
	if err != nil {
		return nil, err
	}
	return inferencev1.NewInferenceWorkerServiceClient(conn).GetInferenceStatus(ctx, &inferencev1.GetInferenceStatusRequest{})
}
