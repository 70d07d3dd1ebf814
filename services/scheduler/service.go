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
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// service is the use cases. Its methods may be called from many goroutines.
type service struct {
	cfg Config
	Deps

	base context.Context // of conductors; ends when the service stops
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu         sync.Mutex
	stopping   bool
	conductors map[string]*conductor
}

func newService(cfg Config, deps Deps) *service {
	s := &service{cfg: cfg, Deps: deps, conductors: map[string]*conductor{}}
	s.base, s.stop = context.WithCancel(context.Background())
	return s
}

// create verifies the plan, records the run and starts it.
func (s *service) create(ctx context.Context, req *runv1.CreateRunRequest) (*Run, error) {
	if key := req.GetIdempotencyKey(); key != "" {
		first, err := s.Store.ByKey(ctx, key)
		if err == nil {
			return first, nil
		}
		if !errors.Is(err, ErrNotFound) {
			return nil, err
		}
	}
	plan, err := s.verify(ctx, req.GetLock(), req.GetBaseDir())
	if err != nil {
		return nil, err
	}
	var cursor Cursor
	from := req.GetFromSnapshot()
	if from != "" {
		if from, cursor, err = s.startingPoint(ctx, plan, from); err != nil {
			return nil, err
		}
	}
	now := s.Now().UTC()
	run := &Run{
		RunId: id.NewRun(now), Name: plan.GetConfig().GetName(), Plan: plan, BaseDir: req.GetBaseDir(), State: Pending,
		CreateTime: timestamppb.New(now), FromSnapshot: from, Step: cursor.FirstStep, TotalSteps: plan.GetConfig().GetTrain().GetSteps(),
		Incarnation: 1,
	}
	run.Directory = filepath.Join(s.cfg.StateDir, "runs", run.GetRunId())
	recorded, err := s.Store.Create(ctx, run, req.GetIdempotencyKey(), cursor)
	if err != nil || recorded.GetRunId() != run.GetRunId() {
		return recorded, err
	}
	crashpoint.Here("scheduler/created") // the run is recorded, nobody conducts it
	s.announce(recorded)
	return recorded, s.conduct(recorded)
}

// verify asks the planner whether the plan's inputs still are what they were.
func (s *service) verify(ctx context.Context, lock []byte, baseDir string) (*planv1.Plan, error) {
	resp, err := s.Planner.VerifyPlan(ctx, &planv1.VerifyPlanRequest{Lock: lock, File: "plan.lock", BaseDir: baseDir})
	if err != nil {
		return nil, fmt.Errorf("verify the plan: %w", err)
	}
	bad, n := ErrPlanChanged, len(resp.GetProblems())
	switch {
	case resp.GetPlan() == nil:
		bad = ErrPlanUnreadable
	case n == 0:
		return resp.GetPlan(), nil
	case n == 1:
		bad = bad.WithMessage("something that the plan pins has changed since it was made")
	default:
		bad = bad.WithMessage("%d things that the plan pins have changed since it was made", n)
	}
	for _, p := range resp.GetProblems() {
		where := p.GetFile()
		if p.GetField() != "" {
			where = p.GetField()
		}
		bad = bad.Field(where, p.GetMessage())
	}
	return nil, bad
}

// resumable says of changed inputs how the run can go on all the same: what it consumed so far stays as it is recorded, so with
// other inputs it is another run.
func resumable(run *Run, err error) error {
	if e, ok := rpcerr.From(err); ok && errors.Is(e, ErrPlanChanged) {
		return e.Mend("restore it, or go on in a new run, from the newest snapshot of this one and with the inputs as they are now: " +
			"`rollout run --resume " + run.GetRunId() + " --accept-changes`")
	}
	return err
}

// startingPoint is the full id of a snapshot, which is kept from now on, and the cursor of a run that starts from it.
func (s *service) startingPoint(ctx context.Context, plan *planv1.Plan, snapshot string) (string, Cursor, error) {
	resp, err := s.Snapshots.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: snapshot})
	if err != nil {
		return "", Cursor{}, fmt.Errorf("start from snapshot: %w", err)
	}
	snap := resp.GetSnapshot()
	if snap.GetKind() != snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE {
		return "", Cursor{}, ErrSnapshotKind.With("snapshot", snap.GetSnapshotId()).
			WithMessage("snapshot %s is no train_state: a run can't start from it", snap.GetSnapshotId())
	}
	if steps := plan.GetConfig().GetTrain().GetSteps(); snap.GetStep() >= steps {
		return "", Cursor{}, ErrNothingToDo.With("snapshot", snap.GetSnapshotId()).
			WithMessage("snapshot %s is of step %d, and the plan wants %d steps: none is left", snap.GetSnapshotId(), snap.GetStep(), steps).
			Mend(fmt.Sprintf("raise `train.steps` above %d: `rollout run --config FILE --from %s`", snap.GetStep(), snap.GetSnapshotId()))
	}
	if _, err := s.Snapshots.PinSnapshot(ctx, &snapshotv1.PinSnapshotRequest{SnapshotId: snap.GetSnapshotId()}); err != nil {
		return "", Cursor{}, fmt.Errorf("keep the snapshot that the run starts from: %w", err)
	}
	position := snap.GetCursor().GetPosition()
	return snap.GetSnapshotId(), Cursor{Position: position, First: position, FirstStep: snap.GetStep()}, nil
}

// pause stops issuing.
func (s *service) pause(ctx context.Context, runID string) (*Run, error) {
	return s.transition(ctx, runID, Paused, func(r *Run) error {
		if st := r.GetState(); st != Starting && st != Running && st != Paused {
			return ErrNotPausable.With("run", runID).With("state", st.String()).
				WithMessage("run %s is %s: only a run that is starting or running can be paused", runID, stateName(st))
		}
		return unreason(r) // by request, whatever it was paused for before
	})
}

// resume goes on with a run; see the drawing.
func (s *service) resume(ctx context.Context, runID string) (*Run, error) {
	run, err := s.Store.Get(ctx, runID)
	if err != nil {
		return nil, err
	}
	orphan := active(run.GetState()) && s.conductor(runID) == nil // of a scheduler that died or stepped down
	switch run.GetState() {
	case Succeeded:
		return nil, finished(run)
	case Draining:
		if !orphan {
			return nil, ErrNotResumable.With("run", runID).With("state", run.GetState().String()).
				WithMessage("run %s is being stopped", runID).Mend("resume it when it has stopped: `rollout runs show " + runID + "` tells")
		}
	case Pending, Starting, Running:
		if !orphan {
			return run, nil
		}
	case Paused:
		if !orphan {
			return s.transition(ctx, runID, Starting, unreason) // RUNNING again with the controller's next word
		}
	}
	lock, err := id.CanonicalJSON(run.GetPlan())
	if err != nil {
		return nil, fmt.Errorf("write the plan of %s: %w", runID, err)
	}
	if _, err := s.verify(ctx, lock, run.GetBaseDir()); err != nil {
		return nil, resumable(run, err)
	}
	if old := s.conductor(runID); old != nil { // it has reached its end and is about to leave
		select {
		case <-old.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.begin(ctx, run)
}

// begin records the next incarnation of a run that nobody conducts, and conducts it. Who saw the run before somebody else began it
// gets what the other made.
func (s *service) begin(ctx context.Context, seen *Run) (*Run, error) {
	to := Starting
	if seen.GetState() == Paused {
		to = Paused // whoever paused it knows nothing of a scheduler that died
	}
	var begun bool
	run, err := s.update(ctx, seen.GetRunId(), func(r *Run) error {
		if begun = r.GetIncarnation() == seen.GetIncarnation(); !begun {
			return nil
		}
		if active(r.GetState()) && to != Paused {
			if err := move(r, Interrupted); err != nil {
				return err
			}
		}
		r.Incarnation++
		if to == Paused {
			return nil // with its reason: what waits for room goes on by itself when there is some
		}
		r.Reason, r.Message, r.EndTime = "", "", nil
		return move(r, to)
	})
	if err != nil || !begun {
		return run, err
	}
	s.announce(run)
	crashpoint.Here("scheduler/resumed") // the next incarnation is recorded, nobody conducts it
	return run, s.conduct(run)
}

// cancel stops a run: with drain the step in hand is finished first.
func (s *service) cancel(ctx context.Context, runID string, drain bool) (*Run, error) {
	run, err := s.Store.Get(ctx, runID)
	if err != nil {
		return nil, err
	}
	c := s.conductor(runID)
	if c == nil || !active(run.GetState()) {
		if run.GetState() != Interrupted && !active(run.GetState()) {
			return run, nil
		}
		return s.transition(ctx, runID, Cancelled, func(r *Run) error {
			r.EndTime = timestamppb.New(s.Now().UTC())
			return nil
		})
	}
	if drain && run.GetState() == Starting && c.progress().GetPhase() <= learnerv1.Phase_PHASE_PREPARING { // no step is in hand
		c.end(&ending{state: Cancelled, message: "cancelled by request while it started"})
		return run, nil
	}
	if !drain || run.GetState() == Pending {
		c.end(&ending{state: Cancelled, message: "cancelled by request"})
		return run, nil
	}
	if run.GetState() != Draining {
		if run, err = s.transition(ctx, runID, Draining, nil); err != nil {
			return nil, err
		}
	}
	c.drain()
	return run, nil
}

// complete is the controller's word that a run has ended.
func (s *service) complete(ctx context.Context, req *runv1.CompleteRunRequest) error {
	run, err := s.Store.Get(ctx, req.GetRunId())
	if err != nil {
		return err
	}
	c := s.conductor(req.GetRunId())
	if c == nil || run.GetIncarnation() != req.GetIncarnation() || !active(run.GetState()) {
		s.Log.InfoContext(ctx, "the end of an older incarnation is ignored", "run", req.GetRunId(), "incarnation", req.GetIncarnation())
		return nil
	}
	c.end(&ending{state: req.GetState(), reason: req.GetReason(), message: req.GetMessage()})
	return nil
}

// transition changes the state; check (may be nil) looks at the run before and may alter it. To the state that it has already
// it does nothing.
func (s *service) transition(ctx context.Context, runID string, to State, check func(*Run) error) (*Run, error) {
	same := false
	run, err := s.update(ctx, runID, func(r *Run) error {
		if check != nil {
			if err := check(r); err != nil {
				return err
			}
		}
		if same = r.GetState() == to; same {
			return nil
		}
		return move(r, to)
	})
	if err == nil && !same {
		s.announce(run)
	}
	return run, err
}

// update changes the record of a run. Its conductor sees the changes in the order in which they were written.
func (s *service) update(ctx context.Context, runID string, change func(*Run) error) (*Run, error) {
	c := s.conductor(runID)
	if c == nil {
		return s.Store.Update(ctx, runID, change)
	}
	c.records.Lock()
	defer c.records.Unlock()
	run, err := s.Store.Update(ctx, runID, change)
	if err == nil {
		c.see(run)
	}
	return run, err
}

// announce emits the run.state event.
func (s *service) announce(run *Run) {
	level := eventv1.Level_LEVEL_INFO
	if run.GetState() == Failed {
		level = eventv1.Level_LEVEL_ERROR
	}
	name := stateName(run.GetState())
	message := "run is " + name
	if run.GetMessage() != "" {
		message += ": " + run.GetMessage()
	}
	s.emit(run, &eventv1.Event{Kind: "run.state", Level: level, Message: message, Step: run.GetStep(),
		Attributes: map[string]string{"state": name, "reason": run.GetReason()}})
	s.Log.Info("run changed", "run", run.GetRunId(), "state", name, "reason", run.GetReason())
}

func (s *service) emit(run *Run, e *eventv1.Event) {
	now := s.Now().UTC()
	e.EventId, e.RunId, e.Time, e.Service = id.New(now), run.GetRunId(), timestamppb.New(now), "scheduler"
	s.Events.Emit(e)
}

func stateName(st State) string { return st.String()[len("RUN_STATE_"):] }

// conduct starts the conductor of a run.
func (s *service) conduct(run *Run) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		return ErrStopping
	}
	c := newConductor(s, run)
	s.conductors[run.GetRunId()] = c
	s.wg.Go(func() {
		c.run(s.base)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.conductors[c.id] == c {
			delete(s.conductors, c.id)
		}
	})
	return nil
}

func (s *service) conductor(runID string) *conductor {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conductors[runID]
}

// left are the runs that a dead process left active. Where nobody goes on with them by itself they are INTERRUPTED from now on.
func (s *service) left(ctx context.Context) ([]string, error) {
	runs, err := s.Store.List(ctx, Filter{States: activeStates})
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, run := range runs {
		ids = append(ids, run.GetRunId())
		if s.cfg.ResumeOnStart { // what is recorded of them stays: if this process dies too, the next one finds them
			continue
		}
		if err := s.interrupt(ctx, run.GetRunId(), "the control plane died"); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

func (s *service) interrupt(ctx context.Context, runID, why string) error {
	_, err := s.transition(ctx, runID, Interrupted, func(r *Run) error {
		r.Message = why + "; `rollout run --resume " + runID + "` goes on"
		return nil
	})
	return err
}

// adopt goes on with a run that a dead process left active, however long what that takes is away.
func (s *service) adopt(ctx context.Context, runID string) {
	for delay := 100 * time.Millisecond; ; delay = min(2*delay, 2*time.Second) {
		_, err := s.resume(ctx, runID)
		if err == nil || ctx.Err() != nil {
			return
		}
		if !transient(err) {
			s.Log.ErrorContext(ctx, "run could not be resumed", "run", runID, "error", err)
			if err := s.interrupt(ctx, runID, "it could not be resumed: "+rpcerr.Text(err)); err != nil {
				s.Log.ErrorContext(ctx, "the run's record still says that it is active", "run", runID, "error", err)
			}
			return
		}
		s.Log.WarnContext(ctx, "run can't be resumed yet", "run", runID, "error", err)
		if pause(ctx, delay) != nil {
			return
		}
	}
}

// catchUpPatience is how long the ledger of a run that a dead process left behind is waited for.
const catchUpPatience = 2 * time.Second

// catchUp writes the steps that the ledgers have committed into the records of runs: a process that was killed wrote its last
// ones there and nowhere else.
func (s *service) catchUp(ctx context.Context, ids []string) {
	ctx, cancel := context.WithTimeout(ctx, catchUpPatience)
	defer cancel()
	for _, id := range ids {
		if err := s.catchUpOne(ctx, id); err != nil {
			s.Log.WarnContext(ctx, "the record of a run may lack its last steps", "run", id, "error", err)
		}
	}
}

func (s *service) catchUpOne(ctx context.Context, id string) error {
	run, err := s.Store.Get(ctx, id)
	if err != nil {
		return err
	}
	var resp *bufferv1.ListStepsResponse
	for {
		resp, err = s.Buffer.ListSteps(ctx, &bufferv1.ListStepsRequest{RunId: id, FromStep: run.GetStep() + 1})
		if err == nil || !transient(err) || ctx.Err() != nil {
			break
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	if rpcerr.Code(err) == codes.NotFound || err == nil && len(resp.GetSteps()) == 0 {
		return nil // it was killed before its ledger was opened, or between two steps
	}
	if err != nil {
		return err
	}
	last := resp.GetSteps()[len(resp.GetSteps())-1]
	_, err = s.update(ctx, id, func(r *Run) error {
		r.Step = max(r.GetStep(), last.GetStep())
		folder := filepath.Join(r.GetDirectory(), "weights", fmt.Sprintf("v%06d", last.GetStep()))
		if _, err := os.Stat(folder); err == nil {
			r.WeightsDirectory, r.WeightsDigest = folder, last.GetWeightsDigest()
		}
		return nil
	})
	return err
}

// sweep removes the streams of runs that have succeeded: who recorded their end may have died before it did. Nobody goes on with them.
func (s *service) sweep(ctx context.Context) {
	runs, err := s.Bus.Runs(ctx)
	for _, id := range runs {
		if run, e := s.Store.Get(ctx, id); e == nil && run.GetState() == Succeeded { // another is not ours, or may be resumed
			err = errors.Join(err, s.Bus.DeleteRun(ctx, id))
		}
	}
	if err != nil && ctx.Err() == nil {
		s.Log.WarnContext(ctx, "the streams of runs that have succeeded may be left", "error", err)
	}
}

// shutdown interrupts every run and waits for the conductors.
func (s *service) shutdown() {
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	s.stop()
	s.wg.Wait()
}

// transient reports whether a call may succeed when it is repeated.
func transient(err error) bool {
	switch rpcerr.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted, codes.Canceled:
		return true
	}
	return false
}
