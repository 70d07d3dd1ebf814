package scheduler

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/process"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/wait"
	"github.com/rollout-rl/rollout/libs/worker"
	"github.com/rollout-rl/rollout/proto/gen/names"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// slowStatement is how long a statement may wait for a lock before that counts as a wait.
const slowStatement = 2 * time.Second

// inspectTimeout is how long a worker has to answer what it does.
const inspectTimeout = 2 * time.Second

// inspect asks every worker and the gateway what they wait for now, and completes a status with it.
func (p *poller) inspect(ctx context.Context, status *runv1.RunStatus) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	var asked sync.WaitGroup
	var gateway []*waitv1.Wait
	// Without the lock: a gateway that does not know the run asks this scheduler for it, which polls.
	asked.Go(func() { gateway = p.gateway(ctx, status) })
	var database []*waitv1.Wait
	asked.Go(func() { database = p.database(ctx) })
	p.inspectWorkers(ctx, status)
	asked.Wait()
	status.Waits = slices.Concat(database, located(status.GetWaits()), gateway)
}

// database lists the locks of PostgreSQL that services wait for.
func (p *poller) database(ctx context.Context) (out []*waitv1.Wait) {
	if p.Locks == nil {
		return nil
	}
	locks, err := p.Locks(ctx)
	if err != nil {
		p.Log.DebugContext(ctx, "the locks of the database can't be listed", "error", err)
	}
	for _, b := range locks {
		if b.For < slowStatement { // the services wait for each other's transactions, for a moment
			continue
		}
		out = append(out, &waitv1.Wait{
			Owner: wait.User, Reason: wait.DatabaseBlocked, Subjects: []string{b.Service}, Since: timestamppb.New(p.Now().UTC().Add(-b.For)),
			Evidence: fmt.Sprintf("the database of %s, where a statement waits for %s", b.Service, b.Sentence()), Fix: b.Fix(),
		})
	}
	return out
}

// located adds to waits for NATS which process of this host does not answer.
func located(waits []*waitv1.Wait) []*waitv1.Wait {
	out := slices.Clone(waits)
	for i, w := range out {
		if w.GetOwner() != wait.NATS || w.GetReason() != wait.NoAnswer {
			continue
		}
		for _, address := range addresses.FindAllString(w.GetEvidence(), -1) {
			p, found := process.Listener(address)
			if !found {
				continue
			}
			w = proto.CloneOf(w)
			w.Evidence += fmt.Sprintf("; at %s listens the process %d of this host (%s)", address, p.PID, p.Command)
			if p.Stopped {
				w.Evidence += ", which is stopped by a signal or a debugger"
				w.Fix = fmt.Sprintf("continue it: `kill -CONT %d`; the run then continues", p.PID)
			}
			out[i] = w
		}
	}
	return out
}

// addresses matches those of servers in a sentence.
var addresses = regexp.MustCompile(`(\[[0-9a-f:]+\]|[A-Za-z0-9_.-]+):\d{1,5}\b`)

// inspectWorkers asks every worker what it waits for now.
func (p *poller) inspectWorkers(ctx context.Context, status *runv1.RunStatus) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	var wg sync.WaitGroup
	processes := readProcesses()
	var throttled sync.Map // waits by worker
	defer func() {
		for _, w := range status.GetWorkers() {
			if found, is := throttled.Load(w.GetWorkerId()); is {
				w.Waits = append([]*waitv1.Wait{found.(*waitv1.Wait)}, w.GetWaits()...)
			}
		}
	}()
	for _, w := range status.GetWorkers() {
		w.Waits = append(w.Waits, processes.waits(w)...)
		wg.Go(func() {
			if found := (cgroupTree{root: cgroups, proc: "/proc"}).throttled(ctx, w); found != nil {
				throttled.Store(w.GetWorkerId(), found)
			}
		})
		if !w.GetHealthy() {
			continue
		}
		conn, err := p.connect(w.GetAddress())
		if err != nil {
			w.Waits = append(w.Waits, p.silent(w, err))
			continue
		}
		wg.Go(func() {
			if err := ask(ctx, conn, w); err != nil {
				w.Waits = append(w.Waits, p.silent(w, err))
			}
		})
	}
	wg.Wait()
}

// gateway asks what requests and agents wait for. A gateway that does not answer stops only a run
// whose groups agents sample.
func (p *poller) gateway(ctx context.Context, status *runv1.RunStatus) []*waitv1.Wait {
	got, err := p.Sessions.ListWaits(ctx, &gatewayv1.ListWaitsRequest{RunId: p.run})
	if err == nil {
		return got.GetWaits()
	}
	if !algorithm.External(status.GetRun().GetPlan().GetConfig()) {
		return nil
	}
	return []*waitv1.Wait{{
		Owner: names.GatewayService, Reason: wait.NoAnswer, Subjects: []string{names.GatewayService}, Since: timestamppb.New(p.Now().UTC()),
		Evidence: "the gateway, from which agents take prompts, to answer: " + rpcerr.Text(err), Fix: "check that the gateway runs (`rollout status`)",
	}}
}

// ask asks one worker. Workers of other kinds than inference and learner have nothing in flight.
func ask(ctx context.Context, conn Conn, w *runv1.Worker) error {
	switch w.GetKind() {
	case worker.Inference.Name:
		got, err := inferencev1.NewInferenceWorkerServiceClient(conn).GetInferenceStatus(ctx, &inferencev1.GetInferenceStatusRequest{InFlight: true})
		if err != nil {
			return err
		}
		w.Waits, w.Activity = append(w.Waits, got.GetWaits()...), got.GetActivity()
	case worker.Learner.Name:
		got, err := learnerv1.NewLearnerWorkerServiceClient(conn).GetLearnerStatus(ctx, &learnerv1.GetLearnerStatusRequest{})
		if err != nil {
			return err
		}
		w.Activity = got.GetActivity()
		if got.GetWait() != nil {
			w.Waits = append(w.Waits, got.GetWait())
		}
	}
	return nil
}

func (p *poller) silent(w *runv1.Worker, err error) *waitv1.Wait {
	return &waitv1.Wait{
		Owner: w.GetWorkerId(), Reason: wait.WorkerSilent, Subjects: []string{w.GetWorkerId()}, Since: timestamppb.New(p.Now().UTC()),
		Evidence: fmt.Sprintf("%s is registered and does not answer within %s: %s", w.GetWorkerId(), inspectTimeout, rpcerr.Text(err)),
		Fix:      "see its output with `rollout logs worker " + p.run + " " + w.GetWorkerId() + "`; a worker that is killed is restarted, and its groups move to another one",
	}
}
