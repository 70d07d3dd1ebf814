// Package scheduler owns runs: their life, their place in the dataset, their workers, and the work that is handed out.
//
//	          CreateRun
//	              |
//	              v
//	           PENDING
//	              |  streams, ledger, workers and controller are being started
//	              v         PauseRun
//	          STARTING <---------------> PAUSED
//	              |  first lease           ^
//	              v        PauseRun, ..    |
//	           RUNNING <-------------------+
//	              |  CancelRun(drain), or all steps made: workers stop
//	              v
//	          DRAINING --> SUCCEEDED | CANCELLED
//
//	PENDING, STARTING, RUNNING, PAUSED, DRAINING --> FAILED        the controller or a crash loop said so
//	                                             --> CANCELLED     CancelRun without drain
//	                                             --> INTERRUPTED   the service stopped or died, unless the next one goes on by itself
//	INTERRUPTED, FAILED, CANCELLED --ResumeRun--> STARTING         with the next incarnation
//
//	STARTING, RUNNING --> PAUSED                                    PauseRun; the buffer has no room; the learner refused a gradient
//	PAUSED --> STARTING                                             ResumeRun; there is room again. After a refused gradient ResumeRun
//	                                                                alone, with the next incarnation: the drive has stopped. So it stays
//	                                                                PAUSED, without a conductor, where the service stops or dies
//
// Else a run that is PENDING to DRAINING has a conductor: the goroutines that open the ledger, supervise workers, issue prompt groups
// and listen to the controller. The cursor is durable before a group is published; what a crash left unpublished or unfinished
// is found by comparing the cursor with the ledger and published again (see issuer.go).
package scheduler

import (
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Run is the record of a run. The contract's message is the noun of every layer.
type Run = runv1.Run

// State is where a run stands.
type State = runv1.RunState

// The states, by their short names.
const (
	Pending     = runv1.RunState_RUN_STATE_PENDING
	Starting    = runv1.RunState_RUN_STATE_STARTING
	Running     = runv1.RunState_RUN_STATE_RUNNING
	Paused      = runv1.RunState_RUN_STATE_PAUSED
	Draining    = runv1.RunState_RUN_STATE_DRAINING
	Interrupted = runv1.RunState_RUN_STATE_INTERRUPTED
	Succeeded   = runv1.RunState_RUN_STATE_SUCCEEDED
	Failed      = runv1.RunState_RUN_STATE_FAILED
	Cancelled   = runv1.RunState_RUN_STATE_CANCELLED
)

// Errors of this service. Those with a fix are sentences for people: whoever returns one names the run in its message.
var (
	ErrNotFound  = rpcerr.New(codes.NotFound, "RUN_NOT_FOUND", "there is no such run").Fix("`rollout runs list` shows those there are")
	ErrAmbiguous = rpcerr.New(codes.FailedPrecondition, "RUN_AMBIGUOUS", "several runs begin like that").
			Fix("give more of the id; `rollout runs list` shows them")
	ErrNotResumable = rpcerr.New(codes.FailedPrecondition, "RUN_NOT_RESUMABLE", "the run can't go on")
	ErrNotPausable  = rpcerr.New(codes.FailedPrecondition, "RUN_NOT_PAUSABLE", "only a run that is starting or running can be paused").
			Fix("`rollout runs list --state starting,running` shows those")
	ErrTransition  = rpcerr.New(codes.FailedPrecondition, "RUN_STATE", "the run's state does not allow that")
	ErrPlanChanged = rpcerr.New(codes.FailedPrecondition, "PLAN_INPUTS_CHANGED", "what the plan pins has changed since").
			Fix("restore it, or make the plan anew with `rollout plan`")
	ErrPlanUnreadable = rpcerr.New(codes.InvalidArgument, "PLAN_UNREADABLE", "the plan can't be read").Fix("make it anew with `rollout plan`")
	ErrPlanFormat     = rpcerr.New(codes.FailedPrecondition, "PLAN_FORMAT", "the plan has another format").
				Fix("create it again with `rollout plan`, or use the version of rollout that wrote it")
	// ErrStateFormat says that the state holds runs of plans that this version cannot read.
	ErrStateFormat = rpcerr.New(codes.FailedPrecondition, "STATE_FORMAT", "the state holds runs with plans of another format").
			Fix("finish or delete these runs with the version of rollout that created them, or start with an empty state folder")
	ErrSnapshotKind = rpcerr.New(codes.FailedPrecondition, "SNAPSHOT_NOT_RESTORABLE", "only train_state snapshots can be started from").
			Fix("`rollout snapshot list` shows the kind of each")
	ErrNothingToDo = rpcerr.New(codes.FailedPrecondition, "NO_STEPS_LEFT", "the snapshot has all the steps that the plan wants")
	ErrCursor      = rpcerr.New(codes.Aborted, "CURSOR_MOVED", "another process issues for this run")
	ErrStopping    = rpcerr.New(codes.Unavailable, rpcerr.ReasonDraining, "the scheduler is going away").RetryAfter(time.Second)
)

// transitions is the drawing above as a table.
var transitions = map[State][]State{
	Pending:     {Starting, Failed, Cancelled, Interrupted},
	Starting:    {Running, Paused, Draining, Failed, Cancelled, Interrupted},
	Running:     {Paused, Draining, Succeeded, Failed, Cancelled, Interrupted},
	Paused:      {Starting, Running, Draining, Succeeded, Failed, Cancelled, Interrupted},
	Draining:    {Succeeded, Failed, Cancelled, Interrupted},
	Interrupted: {Starting, Cancelled},
	Failed:      {Starting},
	Cancelled:   {Starting},
	Succeeded:   nil,
}

// activeStates are those that have a conductor.
var activeStates = []State{Pending, Starting, Running, Paused, Draining}

// endStates are those of runs that nobody goes on with unasked. Their records have an end time.
var endStates = []State{Succeeded, Failed, Cancelled}

func active(s State) bool { return slices.Contains(activeStates, s) }

// ended reports whether a watcher has seen the last of the run until somebody resumes it.
func ended(s State) bool { return !active(s) }

// NotFound is ErrNotFound of a run that was asked for.
func NotFound(ref string) error {
	return ErrNotFound.With("run", ref).WithMessage("there is no run %q", ref)
}

// finished is ErrNotResumable of a run that has made its steps, with where they are.
func finished(run *Run) error {
	fix := "to train on, raise `train.steps` and start a run from it: `rollout run --config FILE --from " + run.GetRunId() + "`"
	if weights := run.GetWeightsDirectory(); weights != "" {
		fix = "its weights are in " + weights + "; " + fix
	}
	return ErrNotResumable.With("run", run.GetRunId()).With("state", run.GetState().String()).Fix(fix).
		WithMessage("run %s is finished: all its %d steps were made", run.GetRunId(), run.GetTotalSteps())
}

// move changes the state as the table allows. ErrTransition otherwise.
func move(run *Run, to State) error {
	if !slices.Contains(transitions[run.GetState()], to) {
		return ErrTransition.With("run", run.GetRunId()).With("state", run.GetState().String()).With("wanted", to.String()).
			WithMessage("run %s is %s and can't become %s", run.GetRunId(), stateName(run.GetState()), stateName(to))
	}
	run.State = to
	return nil
}
