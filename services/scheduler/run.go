// Package scheduler owns runs: their lifecycle, their position in the dataset, their workers, and
// the work that is issued.
//
//	          CreateRun
//	              |
//	              v
//	           PENDING
//	              |  streams, ledger, workers, and controller start
//	              v         PauseRun
//	          STARTING <---------------> PAUSED
//	              |  first lease           ^
//	              v        PauseRun, ..    |
//	           RUNNING <-------------------+
//	              |  CancelRun(drain), or all steps are committed: workers stop
//	              v
//	          DRAINING --> SUCCEEDED | CANCELLED
//
//	PENDING, STARTING, RUNNING, PAUSED, DRAINING --> FAILED        the controller reported it, or a worker is in a crash loop
//	                                             --> CANCELLED     CancelRun without drain
//	                                             --> INTERRUPTED   the service stopped or died, and the next one does not resume runs itself
//	INTERRUPTED, FAILED, CANCELLED --ResumeRun--> STARTING         with the next incarnation
//	SUCCEEDED, FAILED, CANCELLED, INTERRUPTED --DeleteRun--> DELETING, until the record is deleted as the last trace of the run
//
//	STARTING, RUNNING --> PAUSED                                    PauseRun; the buffer cannot ingest; the learner refused a gradient
//	PAUSED --> STARTING                                             ResumeRun; the buffer ingests again. After a refused gradient only
//	                                                                ResumeRun, with the next incarnation, because the controller has
//	                                                                stopped. The run stays PAUSED if the service stops or dies
//
// A run that is PENDING to DRAINING has a conductor, unless a refused gradient paused it before a
// restart. The conductor runs the parts of the run, each a type with one responsibility:
//
//	records       the record of the run, and the events about its state
//	board         what the parts observed last; watchers read it
//	supervision   worker processes and their registrations
//	control       the link to the learner-controller
//	issue.Issuer  prompt groups: the cursor is durable before a group is published, and what a crash left unpublished or incomplete is
//	              found by comparing the cursor with the ledger
//	backpressure  pauses the run while the buffer cannot ingest
//	trackers      the process that writes to experiment trackers
//	closing       the end of the run in the other services and the store
package scheduler

import (
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Run is the record of a run. All layers use the message of the contract.
type Run = runv1.Run

// State is the state of a run.
type State = runv1.RunState

// The states.
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
	Deleting    = runv1.RunState_RUN_STATE_DELETING
)

// Errors of this service. An error with a fix is shown to people, so its message must name the run.
var (
	ErrNotFound  = rpcerr.New(codes.NotFound, "RUN_NOT_FOUND", "the run does not exist").Fix("`rollout runs list` shows all runs")
	ErrAmbiguous = rpcerr.New(codes.FailedPrecondition, "RUN_AMBIGUOUS", "several runs have this prefix").
			Fix("give more characters of the id; `rollout runs list` shows the ids")
	ErrNotResumable = rpcerr.New(codes.FailedPrecondition, "RUN_NOT_RESUMABLE", "the run cannot be resumed")
	ErrNotPausable  = rpcerr.New(codes.FailedPrecondition, "RUN_NOT_PAUSABLE", "only a run that is starting or running can be paused").
			Fix("`rollout runs list --state starting,running` shows such runs")
	ErrActive      = rpcerr.New(codes.FailedPrecondition, "RUN_ACTIVE", "an active run cannot be deleted")
	ErrInUse       = rpcerr.New(codes.FailedPrecondition, "RUN_IN_USE", "files of the run are in use")
	ErrTransition  = rpcerr.New(codes.FailedPrecondition, "RUN_STATE", "the state of the run does not allow this")
	ErrPlanChanged = rpcerr.New(codes.FailedPrecondition, "PLAN_INPUTS_CHANGED", "inputs of the plan have changed since it was made").
			Fix("restore them, or make the plan again with `rollout plan`")
	ErrPlanUnreadable = rpcerr.New(codes.InvalidArgument, "PLAN_UNREADABLE", "the plan cannot be read").Fix("make it again with `rollout plan`")
	ErrPlanFormat     = rpcerr.New(codes.FailedPrecondition, "PLAN_FORMAT", "the plan has another format").
				Fix("create it again with `rollout plan`, or use the version of rollout that wrote it")
	// ErrStateFormat: the state has runs with plans that this version cannot read.
	ErrStateFormat = rpcerr.New(codes.FailedPrecondition, "STATE_FORMAT", "the state holds runs with plans of another format").
			Fix("finish or delete these runs with the version of rollout that created them, or start with an empty state folder")
	ErrSnapshotKind = rpcerr.New(codes.FailedPrecondition, "SNAPSHOT_NOT_RESTORABLE", "a run can start from a train_state snapshot only").
			Fix("`rollout snapshot list` shows the kind of each")
	ErrInput = rpcerr.New(codes.FailedPrecondition, "INPUT_UNREADABLE", "the scheduler cannot read an input that the planner made").
			Fix("planner and scheduler must share a folder: set `shared_dir` to the same one in both")
	ErrNothingToDo = rpcerr.New(codes.FailedPrecondition, "NO_STEPS_LEFT", "the snapshot has all steps of the plan already")
	ErrCursor      = rpcerr.New(codes.Aborted, "CURSOR_MOVED", "another process moved the cursor of the run")
	ErrStopping    = rpcerr.New(codes.Unavailable, rpcerr.ReasonDraining, "the scheduler is stopping").RetryAfter(time.Second)
)

// transitions is the state machine above as a table.
var transitions = map[State][]State{
	Pending:     {Starting, Failed, Cancelled, Interrupted},
	Starting:    {Running, Paused, Draining, Failed, Cancelled, Interrupted},
	Running:     {Paused, Draining, Succeeded, Failed, Cancelled, Interrupted},
	Paused:      {Starting, Running, Draining, Succeeded, Failed, Cancelled, Interrupted},
	Draining:    {Succeeded, Failed, Cancelled, Interrupted},
	Interrupted: {Starting, Cancelled, Deleting},
	Failed:      {Starting, Deleting},
	Cancelled:   {Starting, Deleting},
	Succeeded:   {Deleting},
	Deleting:    nil,
}

// activeStates are the states in which a run has a conductor.
var activeStates = []State{Pending, Starting, Running, Paused, Draining}

// endStates are the states of runs that continue by request only. Their records have an end time.
var endStates = []State{Succeeded, Failed, Cancelled}

func active(s State) bool { return slices.Contains(activeStates, s) }

// ended reports whether nothing more happens to the run unless it is resumed.
func ended(s State) bool { return !active(s) }

// NotFound is ErrNotFound with the id or name that was requested.
func NotFound(ref string) error {
	return ErrNotFound.With("run", ref).WithMessage("run %q does not exist", ref)
}

// finished is ErrNotResumable for a run that has succeeded. It names the weights.
func finished(run *Run) error {
	fix := "to continue training, raise `train.steps` or `train.epochs` and start a run from it: `rollout run --config FILE --from " + run.GetRunId() + " --continue`"
	if weights := run.GetWeightsDirectory(); weights != "" {
		fix = "its weights are in " + weights + "; " + fix
	}
	refused := ErrNotResumable.With("run", run.GetRunId()).With("state", run.GetState().String()).Fix(fix)
	if run.GetReason() == refusal.StoppedByGate {
		return refused.WithMessage("run %s is finished: it was stopped by %s", run.GetRunId(), run.GetMessage())
	}
	return refused.WithMessage("run %s is finished: all its %d steps are committed", run.GetRunId(), run.GetTotalSteps())
}

// move changes the state, or returns ErrTransition if the table does not allow it.
func move(run *Run, to State) error {
	if !slices.Contains(transitions[run.GetState()], to) {
		return ErrTransition.With("run", run.GetRunId()).With("state", run.GetState().String()).With("wanted", to.String()).
			WithMessage("run %s is %s and cannot become %s", run.GetRunId(), stateName(run.GetState()), stateName(to))
	}
	run.State = to
	return nil
}
