package scheduler

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// conductor is the goroutines of one active run.
//
//	open (streams, ledger) -> parts in parallel: supervisors, registry, controller, issuer -> ending -> parts stop -> closed
//
// Whoever knows first why the run ends calls end; the first word holds.
type conductor struct {
	svc         *service
	id          string
	incarnation uint32 // that it conducts; whoever knows of a newer one refuses what it says
	window      Window
	rows        uint64

	endings  chan *ending // holds the first
	draining chan struct{}
	drainOne sync.Once
	done     chan struct{}

	records sync.Mutex // held from the write of the record until the view shows it

	mu      sync.Mutex
	view    view
	changed chan struct{} // closed and replaced on each change
	kept    time.Time     // when progress was written to the store last

	polls  sync.Mutex
	polled time.Time // when the workers were asked last
	lines  lines
}

func newConductor(s *service, run *Run) *conductor {
	c := &conductor{
		svc: s, id: run.GetRunId(), incarnation: run.GetIncarnation(), endings: make(chan *ending, 1), draining: make(chan struct{}), done: make(chan struct{}),
		changed: make(chan struct{}),
	}
	c.view = newView(run)
	return c
}

// end says how the run ends, unless somebody said it before.
func (c *conductor) end(e *ending) {
	select {
	case c.endings <- e:
	default:
	}
}

// drain lets the controller finish the step in hand; the run then ends as cancelled.
func (c *conductor) drain() { c.drainOne.Do(func() { close(c.draining) }) }

// run conducts until the run has ended or ctx ends, which interrupts it.
func (c *conductor) run(ctx context.Context) {
	defer close(c.done)
	defer c.lines.keep(nil)
	if run, err := c.svc.update(ctx, c.id, func(*Run) error { return nil }); err != nil || !active(run.GetState()) {
		return // cancelled before it began
	}
	c.feedSinks()
	parts, cancel := context.WithCancel(ctx)
	defer cancel()
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		c.conductAgain(parts)
	}()
	var e *ending
	select {
	case e = <-c.endings:
		if e == handOver {
			cancel()
			<-finished
			return
		}
	case <-ctx.Done():
		if c.svc.cfg.ResumeOnStart { // by the record it is active, and the next scheduler goes on with it
			cancel()
			<-finished
			return
		}
		e = &ending{state: Interrupted, message: "the control plane stopped; `rollout run --resume " + c.id + "` goes on"}
		if refusal.Paused(c.record()) { // nobody but a person ends that, and its reason is what they need
			e = &ending{state: Paused}
		}
	}
	closing := context.WithoutCancel(ctx)
	if c.taken(closing) {
		cancel()
		<-finished
		return
	}
	c.before(closing, e)
	cancel()
	<-finished
	mark := c.mark(closing) // before the last look at the lease
	if !c.taken(closing) {
		c.after(closing, e, mark)
	}
}

// conductAgain conducts until ctx ends or the run does, from the beginning where what it needs was away for a moment, or its streams
// are gone: they hold nothing that is not made again.
func (c *conductor) conductAgain(ctx context.Context) {
	for {
		err := c.conduct(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		if rpcerr.Code(err) != codes.Unavailable && !errors.Is(err, bus.ErrNoStream) {
			c.end(failure(err))
			return
		}
		c.svc.Log.WarnContext(ctx, "the run begins again", "run", c.id, "error", err)
		if pause(ctx, time.Second) != nil {
			return
		}
	}
}

// conduct opens the run and runs its parts until ctx ends or one fails.
func (c *conductor) conduct(ctx context.Context) error {
	run := c.record()
	cursor, err := c.svc.Store.Cursor(ctx, c.id)
	if err != nil {
		return err
	}
	c.window = windowOf(run.GetPlan(), cursor.First, cursor.FirstStep)
	data, err := trainData(run)
	if err != nil {
		return err
	}
	c.rows = data.rows
	if err := os.MkdirAll(filepath.Join(run.GetDirectory(), "workers"), 0o700); err != nil {
		return fmt.Errorf("make the folder of the run: %w", err)
	}
	if run.GetState() == Pending {
		if run, err = c.svc.transition(ctx, c.id, Starting, nil); err != nil {
			return err
		}
	}
	if err := c.open(ctx, run); err != nil {
		return err
	}
	crashpoint.Here("scheduler/opened") // the ledger is open, no worker is started
	parts, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	failed := make(chan error, 1)
	start := func(part func(context.Context) error) {
		wg.Go(func() {
			if err := part(parts); err != nil && parts.Err() == nil {
				select {
				case failed <- err:
				default:
				}
			}
		})
	}
	for _, kind := range supervised(run) {
		start(func(ctx context.Context) error { return c.watchRegistry(ctx, kind) })
	}
	for _, sup := range c.supervisors(run) {
		start(sup.Run)
	}
	start(c.control)
	start(c.pressure)
	start(c.drained)
	issuer := newIssuer(c, run, data, cursor.Position)
	start(issuer.run)

	select {
	case err = <-failed:
	case <-ctx.Done():
		err = ctx.Err()
	}
	cancel()
	wg.Wait()
	return err
}

// open makes the streams and the ledger. Workers of an older incarnation are gone: what they had pulled is published again by
// the issuer, so the work stream starts empty.
func (c *conductor) open(ctx context.Context, run *Run) error {
	if err := c.insist(ctx, "the streams of the run (NATS)", func(ctx context.Context) error {
		if err := c.svc.Bus.EnsureRun(ctx, c.id); err != nil {
			return err
		}
		mark, err := c.svc.Bus.WorkMark(ctx, c.id)
		if err != nil {
			return err
		}
		if _, err := c.svc.update(ctx, c.id, func(*Run) error { return nil }); err != nil { // who does not lead any more is refused here
			return err
		}
		return c.svc.Bus.PurgeWork(ctx, c.id, mark)
	}); err != nil {
		return err
	}
	crashpoint.Here("scheduler/streams") // streams are there and work is purged, the ledger is not open
	return c.insist(ctx, "the ledger of the run (buffer)", func(ctx context.Context) error {
		resp, err := c.svc.Buffer.OpenLedger(ctx, &bufferv1.OpenLedgerRequest{
			RunId: c.id, Config: c.window.ledgerConfig(run.GetPlan(), c.rows), Incarnation: c.incarnation,
		})
		if err == nil {
			c.seeLedger(resp.GetState())
		}
		return err
	})
}
