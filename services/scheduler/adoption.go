package scheduler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/atomicfile"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/telemetry"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// keptWorker is what a scheduler that takes over needs to adopt a worker: the file
// workers/<id>.process in the folder of the run, which is written when the process has started.
type keptWorker struct {
	Handle      string `json:"handle"` // for launch.Keeper
	Nonce       string `json:"nonce"`
	Incarnation uint32 `json:"incarnation"`
	Restarts    int    `json:"restarts"`
}

func keptPath(run *Run, id string) string {
	return filepath.Join(run.GetDirectory(), "workers", id+".process")
}

// record notes a process so that another scheduler can adopt it.
func (s *supervision) record(id string, p launch.Process, restarts int) {
	process, ok := p.(launch.Kept)
	if !ok {
		return
	}
	kept := keptWorker{Handle: process.Handle(), Nonce: s.board.workers()[id].nonce, Incarnation: s.incarnation, Restarts: restarts}
	text, err := json.Marshal(kept)
	if err == nil {
		err = atomicfile.Write(keptPath(s.board.record(), id), text, 0o600)
	}
	if err != nil { // a scheduler that takes over starts another process
		s.Log.Warn("the process of a worker was not recorded; it cannot be adopted", telemetry.AttrRun, s.run, "worker", id, "error", err)
	}
}

// adopted is a running worker that another scheduler, or an earlier term of this one, has started.
type adopted struct {
	keptWorker
	kind    string
	process launch.Process
}

// view is the worker before it is found in the registry.
func (a adopted) view() workerView {
	return workerView{kind: a.kind, process: a.process.ID(), pid: launch.PID(a.process), nonce: a.Nonce, restarts: a.Restarts}
}

// adopt makes this scheduler the owner of the worker processes of a run, by worker. It is empty if
// the launcher does not keep processes, if they have exited, or if they run on another host.
func (d Deps) adopt(ctx context.Context, run *Run) map[string]adopted {
	found := map[string]adopted{}
	keeper, ok := d.Launcher.(launch.Keeper)
	if !ok {
		return found
	}
	for _, kind := range supervised(run) {
		for n := range kind.Count(run.GetPlan().GetConfig()) {
			id := kind.Name + "-" + strconv.Itoa(n)
			a := adopted{kind: kind.Name}
			text, err := os.ReadFile(keptPath(run, id))
			if err == nil {
				err = json.Unmarshal(text, &a.keptWorker)
			}
			if err == nil {
				a.process, err = keeper.Adopt(a.Handle)
			}
			if err != nil {
				d.Log.InfoContext(ctx, "a worker cannot be adopted", telemetry.AttrRun, run.GetRunId(), "worker", id, "error", err)
				continue
			}
			found[id] = a
		}
	}
	return found
}

// giveUp leaves adopted workers to the scheduler that leads, if that is the cause, or stops them.
func giveUp(workers map[string]adopted, cause error) {
	if lost(cause) {
		cause = launch.ErrRelease
	}
	var wg sync.WaitGroup
	for _, w := range workers {
		if !launch.Leave(w.process, cause) {
			wg.Go(func() { w.process.Stop(orphanGrace) })
		}
	}
	wg.Wait()
}

// orphanGrace is the time that such a worker gets to exit.
const orphanGrace = 2 * time.Second

// discard gives up the adopted workers that no supervisor has.
func (s *supervision) discard(cause error) {
	giveUp(s.adopted, cause)
	s.adopted = nil
}

// continues reports whether adopted workers can continue the run as if its scheduler had not died:
// they belong to its incarnation, the controller drives it, or has not begun to. Otherwise the next
// incarnation starts workers.
func (r *runs) continues(ctx context.Context, run *Run, workers map[string]adopted) (bool, error) {
	if len(workers) == 0 || run.GetState() == Pending {
		return false, nil
	}
	for _, w := range workers {
		if w.Incarnation != run.GetIncarnation() {
			return false, nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second) // it may be stopped
	defer cancel()
	resp, err := r.Controller.GetProgress(ctx, &learnerv1.GetProgressRequest{RunId: run.GetRunId()})
	if rpcerr.Code(err) == codes.NotFound {
		return true, nil
	}
	phase := resp.GetProgress().GetPhase()
	return phase < learnerv1.Phase_PHASE_FINISHED || run.GetState() == Draining && phase != learnerv1.Phase_PHASE_FAILED, err
}

// inherit continues a run that a dead scheduler left active: with its workers, which this scheduler
// has adopted, or in the next incarnation. After an error the workers are still adopted, and the
// call may be repeated.
func (r *runs) inherit(ctx context.Context, run *Run, workers map[string]adopted) error {
	if !active(run.GetState()) { // cancelled in the meantime
		r.abandon(ctx, run)
		giveUp(workers, nil)
		return nil
	}
	same, err := r.continues(ctx, run, workers)
	if err != nil {
		return err
	}
	if same {
		if err = r.takeOver(ctx, run, workers); !errors.Is(err, errBegun) {
			return err
		}
	}
	giveUp(workers, nil)
	if same { // another request has ended the run, or begun its next incarnation
		return nil
	}
	_, err = r.restart(ctx, run.GetRunId(), true)
	return err
}

// abandon stops the controller of a run that was cancelled while no scheduler conducted it.
func (r *runs) abandon(ctx context.Context, run *Run) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if _, err := r.Controller.StopRun(ctx, &learnerv1.StopRunRequest{RunId: run.GetRunId(), Fence: r.fence(run.GetIncarnation())}); err != nil {
		r.Log.DebugContext(ctx, "the controller could not be stopped", telemetry.AttrRun, run.GetRunId(), "error", err)
	}
}

// errBegun reports that a run has another state than the decision to adopt its workers assumed.
var errBegun = errors.New("the run has changed since its workers were adopted")

// takeOver continues a run with adopted workers in the same incarnation.
func (r *runs) takeOver(ctx context.Context, seen *Run, workers map[string]adopted) error {
	r.beginning.Lock()
	defer r.beginning.Unlock()
	run, err := r.records.update(ctx, seen.GetRunId(), func(run *Run) error { // and not without the lead
		if run.GetIncarnation() != seen.GetIncarnation() || !active(run.GetState()) || r.conductors.get(run.GetRunId()) != nil {
			return errBegun
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := r.conductors.start(run, workers); err != nil {
		return err
	}
	if c := r.conductors.get(run.GetRunId()); c != nil && run.GetState() == Draining {
		c.control.requestDrain()
	}
	return nil
}

// ErrAdopting: a scheduler that has just taken over does not conduct the run yet.
var ErrAdopting = rpcerr.New(codes.Unavailable, "RUN_BEING_ADOPTED", "the scheduler is taking over the run").RetryAfter(200 * time.Millisecond)

// adoptions are the runs that this scheduler is about to continue. Safe for concurrent use.
type adoptions struct {
	mu   sync.Mutex
	open map[string]chan struct{}
}

// expect adds runs.
func (a *adoptions) expect(ids []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.open = map[string]chan struct{}{}
	for _, id := range ids {
		a.open[id] = make(chan struct{})
	}
}

// settle removes a run.
func (a *adoptions) settle(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if done := a.open[id]; done != nil {
		close(done)
		delete(a.open, id)
	}
}

// adoptionWait is how long a request waits until a run is conducted after a takeover.
const adoptionWait = 2 * time.Second

// wait waits until a run is not about to be continued any more, at most adoptionWait. ErrAdopting.
func (a *adoptions) wait(ctx context.Context, id string) error {
	a.mu.Lock()
	done := a.open[id]
	a.mu.Unlock()
	if done == nil {
		return nil
	}
	timer := time.NewTimer(adoptionWait)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-timer.C:
	case <-ctx.Done():
	}
	return ErrAdopting.With("run", id)
}

// announce reports that a worker of another scheduler continues.
func (s *supervision) announce(id string, w adopted) {
	s.emit(&eventv1.Event{
		Kind: "worker.adopted", Level: eventv1.Level_LEVEL_INFO, Step: s.board.record().GetStep(),
		Message:    fmt.Sprintf("%s continues as %s: the scheduler that started it died", id, w.process.ID()),
		Attributes: processAttributes(id, w.process, "restarts", strconv.Itoa(w.Restarts)),
	})
}
