// Package controller runs the learner of each run: it leases a batch, has the learner train on it,
// commits the step, and moves the inference workers to the new weights. The target name of the
// service is learner-controller.
//
// The state machine of a learner (learnerv1.Phase):
//
//	             StartRun
//	                |
//	                v
//	            PREPARING <.......... RECOVERING does the same work with another learner
//	                | state loaded, recorded steps retrained, weights delivered
//	                v
//	+---------> LEASING
//	|               | batch
//	|               v
//	|           TRAINING
//	|               | result
//	|               v
//	|           COMMITTING
//	|               | durable in the ledger
//	|               v
//	|           DELIVERING     skipped when no delivery is due
//	|               v
//	|           EVALUATING     skipped when no evaluation is due
//	|               v
//	+---------- SNAPSHOTTING   skipped when no snapshot is due
//
//	any phase above --gate holds after a step (package gate)--> FINISHED, or STOPPED and run PAUSED
//	any phase above --learner lost--> RECOVERING --> LEASING
//	any phase above --last step made--> FINISHED
//	any phase above --StopRun--> STOPPED
//	any phase above --refused gradient, train.on_refused_gradient = "stop"--> STOPPED, run PAUSED
//	COMMITTING --collapse (package health), health.on_collapse = "pause"--> STOPPED, run PAUSED
//	COMMITTING --collapse, health.on_collapse = "stop"--> FAILED
//	any phase above --error that a retry does not fix--> FAILED
//
// A drive waits in its phase while the disk has no space for what it writes next, or is full, and
// continues by itself (room).
//
// The controller may die in any phase, because other processes keep the state: the ledger records
// the committed steps and the leased batch, the newest snapshot has a training state, and the
// learner repeats the result of its last step. Every start therefore does the same: load the newest
// state k, train on the recorded batches k+1..n again, and continue with step n+1. In deterministic
// mode each repeated step must give the recorded digest, or the run fails with REPLAY_DIVERGED.
// Otherwise the first step with another digest begins a new lineage of the weights, which the
// ledger records and the workers serve from then on. Samples of the lost weights are kept or
// sampled again (recovery.old_lineage).
//
// A learner is lost when a call to it breaks, or when another process is registered in its place.
// The second rule matters while the drive waits for samples or for workers to load weights, because
// it calls no learner then. Weights can be lost too: the last worker that loaded them dies, and the
// learner does not have them either. A drive that waits for samples or evaluations then prepares
// again and delivers what the learner has.
package controller

import (
	"context"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// Reasons of errors and of failed runs.
const (
	ReasonDiverged = "REPLAY_DIVERGED"
	ReasonUnknown  = "DRIVE_NOT_FOUND"
	ReasonStep     = "STEP_FAILED"
	ReasonEmpty    = "EVERY_GROUP_EXCLUDED"
)

// Errors of the service, compared with errors.Is.
var (
	ErrNotFound    = rpcerr.New(codes.NotFound, ReasonUnknown, "the controller does not know this run")
	ErrNothingLeft = rpcerr.New(codes.FailedPrecondition, ReasonEmpty, "every group of the step was excluded, so there is nothing to train on")
	ErrDiverged    = rpcerr.New(codes.DataLoss, ReasonDiverged, "training on a recorded batch again gave different weights")
)

// Short names of the phases.
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

// ended reports whether a phase is final.
func ended(p learnerv1.Phase) bool { return p == finished || p == stopped || p == failed }

// Drive is what a restarted controller needs to continue a run.
type Drive struct {
	Spec    *learnerv1.StartRunRequest
	Phase   learnerv1.Phase
	Step    uint64                     // last committed step at the time of the save; the ledger is authoritative
	Active  bool                       // whether a restarted controller continues it
	Weights *weightsv1.WeightsManifest // newest published weights; nil before the first
	Health  []byte                     // state of the health check (health.Monitor); empty before the first step
	Gates   []byte                     // state of the gates (gate.Monitor); empty without gates

	Evaluation []byte // what reserved workers evaluate, and has no result yet; empty without it
}

// Store keeps drives.
type Store interface {
	// Admit refuses a request that a former leader decided. fence.ErrFenced.
	Admit(ctx context.Context, run string, by *fencev1.Fence) error
	// Save writes a drive, by its run. Durable when it returns. fence.ErrFenced if a former leader has
	// decided it, or the store knows a newer incarnation of the run; fence.ErrDeleted.
	Save(ctx context.Context, d *Drive, by *fencev1.Fence) error
	// Get returns the drive of a run. ErrNotFound.
	Get(ctx context.Context, run string) (*Drive, error)
	// Delete deletes the drive of a run, which gets none from then on. An unknown run is no error.
	// fence.ErrFenced.
	Delete(ctx context.Context, run string, by *fencev1.Fence) error
	// Active returns the drives that a restarted controller continues, ordered by run.
	Active(ctx context.Context) ([]*Drive, error)
}
