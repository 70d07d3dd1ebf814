package gateway

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// maxQueue is the number of requests that may wait for a worker. More are refused.
const maxQueue = 4096

// Errors of requests that no worker can take, compared with errors.Is.
var (
	ErrBusy = rpcerr.New(codes.Unavailable, ReasonBusy, "all inference workers are busy").RetryAfter(time.Second)
	// ErrVersion has the metadata `versions`, separated by commas.
	ErrVersion = rpcerr.New(codes.FailedPrecondition, ReasonVersion, "no worker serves this weights version")
	ErrBehind  = rpcerr.New(codes.Unavailable, ReasonBehind, "no worker serves weights that are new enough").RetryAfter(time.Second)
)

// queue is the requests that wait for a worker, in order. The lock of the directory guards it.
type queue struct {
	tickets  []*ticket
	versions int           // tickets that need a version
	poll     chan struct{} // closed and replaced when workers are to be asked for their versions
}

// ticket is a place in the queue.
type ticket struct {
	run     string
	need    need
	granted chan *lease // receives at most one
	why     obstacle
	since   time.Time
}

func (t *ticket) versioned() bool { return t.need.version != nil || t.need.versionFloor != nil }

// plain is whether any worker with room can take the request.
func (t *ticket) plain() bool { return !t.versioned() && len(t.need.avoid) == 0 }

func (q *queue) add(t *ticket) {
	q.tickets = append(q.tickets, t)
	if t.versioned() {
		q.versions++
		close(q.poll)
		q.poll = make(chan struct{})
	}
}

// remove reports whether the ticket was still in the queue.
func (q *queue) remove(t *ticket) bool {
	at := slices.Index(q.tickets, t)
	if at < 0 {
		return false
	}
	q.tickets = slices.Delete(q.tickets, at, at+1)
	if t.versioned() {
		q.versions--
	}
	return true
}

// acquire returns a worker for a request of a run, waits for one if it must until ctx ends or
// timeout has passed, and then returns the obstacle as an error. If no worker is up, or none serves
// the version that the request needs, it waits only if patient.
func (d *directory) acquire(ctx context.Context, run string, n need, timeout time.Duration, patient bool) (*lease, error) {
	t := &ticket{run: run, need: n, granted: make(chan *lease, 1), since: d.now()}
	d.mu.Lock()
	waiting := slices.ContainsFunc(d.queue.tickets, func(other *ticket) bool { return other.run == run && other.plain() })
	again := time.Duration(0)
	if t.why = allFull; !waiting || !t.plain() {
		var l *lease
		if l, again = d.try(t); l != nil {
			d.mu.Unlock()
			return l, nil
		}
	}
	hopeless := !patient && (t.why == noWorker || t.why == noVersion)
	if full := len(d.queue.tickets) >= maxQueue; hopeless || full {
		d.mu.Unlock()
		if full {
			t.why = allFull
		}
		return nil, d.refusal(t)
	}
	d.queue.add(t)
	d.mu.Unlock()
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	for {
		retry := time.NewTimer(max(10*time.Millisecond, again))
		if again == 0 {
			retry.Stop()
		}
		select {
		case l := <-t.granted:
			retry.Stop()
			return l, nil
		case <-retry.C:
			d.mu.Lock()
			again = d.dispatch()
			d.mu.Unlock()
		case <-deadline.C:
			return d.abandon(t, nil)
		case <-ctx.Done():
			return d.abandon(t, context.Cause(ctx))
		}
		retry.Stop()
	}
}

// abandon leaves the queue. A request that got a worker meanwhile keeps it, unless its caller is
// gone.
func (d *directory) abandon(t *ticket, gone error) (*lease, error) {
	d.mu.Lock()
	waiting := d.queue.remove(t)
	d.mu.Unlock()
	switch {
	case !waiting && gone == nil:
		return <-t.granted, nil
	case !waiting:
		(<-t.granted).release(gone, true)
		return nil, gone
	case gone != nil:
		return nil, gone
	}
	return nil, d.refusal(t)
}

// try gives a request a worker if one can take it. Otherwise it returns when to try again. The
// caller has the lock.
func (d *directory) try(t *ticket) (*lease, time.Duration) {
	var candidates []candidate
	workers := map[string]*worker{}
	for _, w := range d.serving()[t.run] {
		candidates = append(candidates, w.candidate)
		workers[w.id] = w
	}
	id, why, again := route(d.now(), candidates, t.need)
	t.why = why
	if why != noObstacle {
		return nil, again
	}
	w := workers[id]
	w.tokens += t.need.tokens
	w.completions += t.need.completions
	w.breaker.begin()
	return &lease{worker: w, directory: d, need: t.need}, 0
}

// dispatch gives workers to requests that wait, in order, and returns when to call it again. The
// caller has the lock.
func (d *directory) dispatch() (again time.Duration) {
	blocked := map[string]bool{} // runs whose workers have no room
	for _, t := range slices.Clone(d.queue.tickets) {
		if blocked[t.run] && t.plain() {
			continue
		}
		l, pause := d.try(t)
		if l != nil {
			d.queue.remove(t)
			t.granted <- l
			continue
		}
		blocked[t.run] = blocked[t.run] || t.plain()
		if pause > 0 && (again == 0 || pause < again) {
			again = pause
		}
	}
	return again
}

// refusal is the error of a request that no worker could take.
func (d *directory) refusal(t *ticket) error {
	versions := make([]string, 0, 1)
	for _, v := range d.versions(t.run) {
		versions = append(versions, strconv.FormatUint(v, 10))
	}
	held := strings.Join(versions, ",")
	switch t.why {
	case noVersion:
		return ErrVersion.WithMessage("no worker of run %s serves weights version %d; they serve %s", t.run, *t.need.version, held).With("versions", held)
	case oldVersion:
		return ErrBehind.WithMessage("no worker of run %s reached weights version %d in time; they serve %s", t.run, *t.need.versionFloor, held).With("versions", held)
	case allFull, allFailed:
		d.mu.Lock()
		waiting := len(d.queue.tickets)
		d.mu.Unlock()
		return ErrBusy.WithMessage("%s, and %d requests wait for them", ErrBusy, waiting)
	}
	return fmt.Errorf("run %s: %w", t.run, ErrNoWorker)
}
