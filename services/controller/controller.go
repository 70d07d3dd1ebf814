// Package controller drives the learner of each run: it leases a batch, has it trained on, commits the step, and moves
// the inference workers to the new weights. The service's target name is learner-controller.
//
// The life of a drive:
//
//	PREPARING --learner loaded, committed steps made again, weights delivered--> LEASING
//	LEASING --batch--> TRAINING --result--> COMMITTING --durable--> DELIVERING --due--> EVALUATING --due--> SNAPSHOTTING --> LEASING
//	any of these --learner lost--> RECOVERING --as PREPARING--> LEASING
//	after the last step --> FINISHED;  StopRun --> STOPPED;  what no retry fixes --> FAILED
//	the learner refuses a gradient, and is to stop then --> STOPPED, and the run is PAUSED until somebody resumes it
//
// The controller may die in any state. What counts is elsewhere: the ledger knows which steps were committed and which
// batch is leased, the newest snapshot holds a training state, the learner repeats a result that it has. So every start is
// the same walk: load the newest state k, train on the recorded batches k+1..n again, go on with step n+1. In
// deterministic mode each repeated step must give the recorded digest (else FAILED, REPLAY_DIVERGED). Elsewhere a
// difference is an event, the ledger keeps its digest, and workers keep serving the weights that were delivered first:
// those still lie in the run's folder.
//
// A learner is lost when a call to it breaks, or when another process is registered in its place: while the drive waits for samples or
// for workers to load weights it calls no learner, and the weights may have gone with it. Weights are lost too when the last worker that held
// them dies and the learner has none to offer, since it made others: a drive that waits for samples or answers then prepares anew, and delivers
// what the learner holds, or fails with REPLAY_DIVERGED.
package controller

import (
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// Reasons of errors and of failed runs.
const (
	ReasonDiverged = "REPLAY_DIVERGED"
	ReasonStale    = "STALE_INCARNATION"
	ReasonUnknown  = "DRIVE_NOT_FOUND"
	ReasonStep     = "STEP_FAILED"
	ReasonEmpty    = "EVERY_GROUP_EXCLUDED"
)

// Errors of the service, compared with errors.Is.
var (
	ErrNotFound    = rpcerr.New(codes.NotFound, ReasonUnknown, "the controller has never driven this run")
	ErrStale       = rpcerr.New(codes.FailedPrecondition, ReasonStale, "a newer incarnation of this run is known")
	ErrNothingLeft = rpcerr.New(codes.FailedPrecondition, ReasonEmpty, "every group of the step was excluded, there is nothing to train on")
	ErrDiverged    = rpcerr.New(codes.DataLoss, ReasonDiverged, "training on a recorded batch again gave other weights")
)

// Phases, short.
const (
	preparing    = learnerv1.Phase_PHASE_PREPARING
	leasing      = learnerv1.Phase_PHASE_LEASING
	training     = learnerv1.Phase_PHASE_TRAINING
	committing   = learnerv1.Phase_PHASE_COMMITTING
	delivering   = learnerv1.Phase_PHASE_DELIVERING
	evaluating   = learnerv1.Phase_PHASE_EVALUATING
	snapshotting = learnerv1.Phase_PHASE_SNAPSHOTTING
	recovering   = learnerv1.Phase_PHASE_RECOVERING
	finished     = learnerv1.Phase_PHASE_FINISHED
	stopped      = learnerv1.Phase_PHASE_STOPPED
	failed       = learnerv1.Phase_PHASE_FAILED
)

// Drive is what a restarted controller needs to find a run again.
type Drive struct {
	Spec    *learnerv1.StartRunRequest
	Phase   learnerv1.Phase
	Step    uint64                     // last committed step when it was saved; the ledger is what counts
	Active  bool                       // to be driven on after a restart
	Weights *weightsv1.WeightsManifest // newest published weights; nil before the first
}

// ended reports whether nothing more happens in a phase.
func ended(p learnerv1.Phase) bool { return p == finished || p == stopped || p == failed }
