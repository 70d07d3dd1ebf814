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
//	              v        PauseRun        |
//	           RUNNING <-------------------+
//	              |  CancelRun(drain), or all steps made: workers stop
//	              v
//	          DRAINING --> SUCCEEDED | CANCELLED
//
//	PENDING, STARTING, RUNNING, PAUSED, DRAINING --> FAILED        the controller or a crash loop said so
//	                                             --> CANCELLED     CancelRun without drain
//	                                             --> INTERRUPTED   the service stopped or died
//	INTERRUPTED, FAILED, CANCELLED --ResumeRun--> STARTING         with the next incarnation
//
// A run that is PENDING to DRAINING has a conductor: the goroutines that open the ledger, supervise workers, issue prompt groups
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

// Errors of this service.
var (
	ErrNotFound     = rpcerr.New(codes.NotFound, "RUN_NOT_FOUND", "no such run; `rollout runs list` shows those there are")
	ErrAmbiguous    = rpcerr.New(codes.FailedPrecondition, "RUN_AMBIGUOUS", "several runs begin like that; give more of the id")
	ErrNotResumable = rpcerr.New(codes.FailedPrecondition, "RUN_NOT_RESUMABLE", "the run can't go on")
	ErrNotPausable  = rpcerr.New(codes.FailedPrecondition, "RUN_NOT_PAUSABLE", "only a run that is starting or running can be paused")
	ErrTransition   = rpcerr.New(codes.FailedPrecondition, "RUN_STATE", "the run's state does not allow that")
	ErrPlanChanged  = rpcerr.New(codes.FailedPrecondition, "PLAN_INPUTS_CHANGED",
		"what the plan pins has changed since; restore the inputs or make a new plan (`rollout plan`)")
	ErrPlanUnreadable = rpcerr.New(codes.InvalidArgument, "PLAN_UNREADABLE", "the plan can't be read; make it anew (`rollout plan`)")
	ErrSnapshotKind   = rpcerr.New(codes.FailedPrecondition, "SNAPSHOT_NOT_RESTORABLE", "only train_state snapshots can be started from")
	ErrCursor         = rpcerr.New(codes.Aborted, "CURSOR_MOVED", "another process issues for this run")
	ErrStopping       = rpcerr.New(codes.Unavailable, rpcerr.ReasonDraining, "the scheduler is going away").RetryAfter(time.Second)
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

func active(s State) bool { return slices.Contains(activeStates, s) }

// ended reports whether a watcher has seen the last of the run until somebody resumes it.
func ended(s State) bool { return !active(s) }

// move changes the state as the table allows. ErrTransition otherwise.
func move(run *Run, to State) error {
	if !slices.Contains(transitions[run.GetState()], to) {
		return ErrTransition.With("run", run.GetRunId()).With("state", run.GetState().String()).With("wanted", to.String())
	}
	run.State = to
	return nil
}
