// Package external assigns workers to places that an operator starts:
// `rollout-worker KIND --join ADDRESS` on any host that shares the files of the scheduler. A place
// runs one worker at a time. It may join and leave at any time; a worker without a place waits for
// one.
//
//	             place joins --> free --assignment--> busy --exit--> free
//	                              |                    |
//	                              +--leaves, lost------+--> gone
//	Launch --> queued --assignment--> started by the place --exit, place lost--> exited
package external

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/wait"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// answer is how long a place may take to report the exit of a worker after the end of its grace
// period, before it counts as lost.
const answer = 10 * time.Second

// Errors of Join.
var (
	ErrKind   = rpcerr.New(codes.FailedPrecondition, "EXTERNAL_KIND_OFF", "workers of this kind are not external")
	errPlace  = rpcerr.New(codes.InvalidArgument, "EXTERNAL_PLACE", "the first request must describe the place")
	errClosed = rpcerr.New(codes.Unavailable, rpcerr.ReasonDraining, "the scheduler stops").RetryAfter(time.Second)
	errSilent = rpcerr.New(codes.DeadlineExceeded, "EXTERNAL_PLACE_SILENT", "the place did not report that its worker has exited")
)

// Pool implements launch.Launcher with the places that have joined. Safe for concurrent use.
type Pool struct {
	address string
	offers  map[string]chan *process // by kind; each queued process is offered to the free places
	closed  chan struct{}
	close   func()
}

// New makes a pool for workers of these kinds. Places join at the address, which people read.
func New(address string, kinds ...string) *Pool {
	p := &Pool{address: address, offers: map[string]chan *process{}, closed: make(chan struct{})}
	p.close = sync.OnceFunc(func() { close(p.closed) })
	for _, kind := range kinds {
		p.offers[kind] = make(chan *process)
	}
	return p
}

// Close sends all places away. Call it when all processes are stopped.
func (p *Pool) Close() { p.close() }

// Launch implements launch.Launcher. The process is launch.Queued.
func (p *Pool) Launch(c launch.Command) (launch.Process, error) {
	offers := p.offers[c.Kind]
	if offers == nil {
		return nil, fmt.Errorf("workers of the kind %q are not external", c.Kind)
	}
	if len(c.Args) == 0 {
		return nil, errors.New("no worker command is configured")
	}
	process := newProcess(c, p.address)
	go func() { // ends when the process is stopped or assigned
		select {
		case offers <- process:
		case <-process.stops:
			process.end(launch.Exit{Code: -1, NotStarted: "it was stopped before"})
		}
	}()
	return process, nil
}

// Join serves a place until it leaves.
func (p *Pool) Join(stream runv1.PlaceService_JoinServer) error {
	ctx := stream.Context()
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	described := first.GetPlace()
	if described == nil {
		return errPlace
	}
	offers := p.offers[described.GetKind()]
	if offers == nil {
		return ErrKind.With("kind", described.GetKind()).WithMessage("workers of the kind %s are not external", described.GetKind()).
			Fix(fmt.Sprintf("set launch.%s.kind = \"external\" in rolloutd.toml, or start another kind", described.GetKind()))
	}
	at := &place{stream: stream, about: described, reports: make(chan *runv1.JoinRequest)}
	go at.receive(ctx)
	for !at.leaves {
		select {
		case process := <-offers:
			if err := at.run(ctx, process); err != nil {
				return err
			}
		case report, open := <-at.reports:
			if !open {
				return nil
			}
			at.leaves = report.GetLeaves() != nil
		case <-p.closed:
			return errClosed
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// place is a host process that runs one worker at a time.
type place struct {
	stream  runv1.PlaceService_JoinServer
	about   *runv1.Place
	reports chan *runv1.JoinRequest // closed when the stream has ended
	leaves  bool                    // it is assigned nothing more
}

// receive passes on the reports until the stream ends.
func (l *place) receive(ctx context.Context) {
	defer close(l.reports)
	for {
		report, err := l.stream.Recv()
		if err != nil {
			return
		}
		select {
		case l.reports <- report:
		case <-ctx.Done():
			return
		}
	}
}

// run assigns a process, and waits until it has exited. It returns an error if the place can't be
// used again.
func (l *place) run(ctx context.Context, p *process) error {
	c := p.command
	if err := l.stream.Send(&runv1.JoinResponse{Order: &runv1.JoinResponse_Assignment{Assignment: &runv1.Assignment{
		Id: p.id, Arguments: c.Args, Environment: c.Env, Directory: c.Dir, Log: c.Log,
	}}}); err != nil {
		p.end(l.lost())
		return err
	}
	var late <-chan time.Time
	for {
		select {
		case report, open := <-l.reports:
			if !open {
				p.end(l.lost())
				return ctx.Err()
			}
			l.leaves = l.leaves || report.GetLeaves() != nil
			if report.GetStarted().GetId() == p.id {
				p.begin()
			}
			if e := report.GetExited(); e.GetId() == p.id {
				p.end(l.exit(e))
				return nil
			}
		case grace := <-p.stops:
			timer := time.NewTimer(grace + answer)
			defer timer.Stop()
			late = timer.C
			if err := l.stream.Send(&runv1.JoinResponse{Order: &runv1.JoinResponse_Stop{Stop: &runv1.StopWorker{
				Id: p.id, GraceMs: uint32(max(0, grace.Milliseconds())),
			}}}); err != nil {
				p.end(l.lost())
				return err
			}
		case <-late:
			p.end(l.lost())
			return errSilent
		case <-ctx.Done():
			p.end(l.lost())
			return ctx.Err()
		}
	}
}

// exit is what a place has reported.
func (l *place) exit(e *runv1.WorkerExited) launch.Exit {
	out := launch.Exit{Code: int(e.GetCode()), Signal: e.GetSignal(), LastLines: e.GetLastLines(), NotStarted: e.GetNotStarted()}
	if l.leaves {
		out.Left = fmt.Sprintf("was withdrawn from %s by its operator", l.name())
	}
	return out
}

// lost is the exit of a process whose place does not answer any more. The place stops the process.
func (l *place) lost() launch.Exit {
	return launch.Exit{Code: -1, Left: "was lost: the connection to its host process at " + l.name() + " ended"}
}

func (l *place) name() string {
	return fmt.Sprintf("%s (process %d)", cmp.Or(l.about.GetHost(), "an unnamed host"), l.about.GetPid())
}

// process implements launch.Queued.
type process struct {
	id          string
	command     launch.Command
	awaits      chan launch.Awaited
	began, done chan struct{}
	begin       func() // closes began
	finish      sync.Once
	exit        launch.Exit
	stops       chan time.Duration // the grace period of Stop
	stop        sync.Once
}

func newProcess(c launch.Command, address string) *process {
	p := &process{
		id: "external-" + rand.Text()[:12], command: c, awaits: make(chan launch.Awaited, 1), began: make(chan struct{}), done: make(chan struct{}),
		stops: make(chan time.Duration, 1),
	}
	p.begin = sync.OnceFunc(func() { close(p.began) })
	p.awaits <- launch.Awaited{
		Owner: wait.User, Reason: wait.WorkerAwaited, What: "external " + c.Kind + " worker",
		Fix: fmt.Sprintf("start them with `rollout-worker %s --join %s --token FILE`", c.Kind, address),
	}
	return p
}

// end records the exit. Only the first one counts.
func (p *process) end(exit launch.Exit) {
	p.finish.Do(func() {
		p.exit = exit
		close(p.done)
	})
}

func (p *process) ID() string                    { return p.id }
func (p *process) Began() <-chan struct{}        { return p.began }
func (p *process) Awaits() <-chan launch.Awaited { return p.awaits }
func (p *process) Done() <-chan struct{}         { return p.done }

func (p *process) Exit() launch.Exit {
	<-p.done
	return p.exit
}

func (p *process) Stop(grace time.Duration) {
	p.stop.Do(func() { p.stops <- grace })
	<-p.done
}
