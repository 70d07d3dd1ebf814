package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/discovery"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
)

// errLost says that a learner is no more; its state has to be made again.
var errLost = errors.New("the learner was lost")

// errNowhere says that nobody has published weights any more: as when the learner that wrote them was lost.
var errNowhere = fmt.Errorf("%w: nobody has its weights any more", errLost)

// learner is a connection to the learner worker.
type learner struct {
	client learnerv1.LearnerWorkerServiceClient
	conn   Conn

	worker, address, process string
}

// is reports whether a registration is this learner's.
func (l *learner) is(in discovery.Instance) bool {
	return in.Address == l.address && in.Meta["process"] == l.process
}

// connect waits for a learner of this incarnation that answers.
func (d *drive) connect(ctx context.Context) (*learner, error) {
	d.waiting("a learner worker (scheduler starts it)")
	pause := d.cfg.Retry
	for {
		for _, in := range d.learners.list {
			conn, err := d.deps.Dial(in.Address)
			if err != nil {
				continue
			}
			l := &learner{client: learnerv1.NewLearnerWorkerServiceClient(conn), conn: conn, worker: in.Meta["worker"], address: in.Address, process: in.Meta["process"]}
			if _, err := l.client.GetLearnerStatus(ctx, &learnerv1.GetLearnerStatusRequest{}); err == nil {
				return l, nil
			}
			_ = conn.Close()
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		d.learners.next(ctx, pause)
		pause = min(2*pause, 20*d.cfg.Retry)
	}
}

// ask makes a call to the learner; a broken connection is errLost.
func ask[T any](ctx context.Context, l *learner, fn func(ctx context.Context) (T, error)) (T, error) {
	out, err := fn(ctx)
	if err != nil && ctx.Err() == nil && transient(err) {
		return out, fmt.Errorf("%w: %s: %w", errLost, l.worker, err)
	}
	return out, err
}

// learners is the newest list of the learner workers of a run.
type learners struct {
	run         string
	incarnation uint32
	updates     <-chan []discovery.Instance
	list        []discovery.Instance
}

// take makes list, without other runs' learners, the newest.
func (l *learners) take(list []discovery.Instance) {
	l.list = slices.DeleteFunc(slices.Clone(list), func(in discovery.Instance) bool { return !ours(in, l.run, l.incarnation) })
}

// next waits for a change of the list, at most for d.
func (l *learners) next(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case list, ok := <-l.updates:
		if ok {
			l.take(list)
		}
	}
}

// guard returns a context that ends, with errLost as its cause, when another process is registered in the place of held. A drive
// waits mostly for others than the learner, and for ever where those need weights that went with it: in its memory, and in that
// of every worker that had them. The list belongs to guard until end is called.
func (l *learners) guard(ctx context.Context, held *learner) (with context.Context, end func()) {
	with, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			if len(l.list) > 0 && !slices.ContainsFunc(l.list, held.is) {
				cancel(fmt.Errorf("%w: %s is another process now", errLost, held.worker))
				return
			}
			select {
			case <-with.Done():
				return
			case list, ok := <-l.updates:
				if !ok {
					return
				}
				l.take(list)
			}
		}
	})
	return with, func() { cancel(nil); wg.Wait() }
}
