// Package wait has the owners and reasons of waits (rollout.wait.v1) that one component makes and
// another one reads.
package wait

import (
	"strings"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// Owners that are neither a service nor a worker with a name.
const (
	User      = "user"
	Worker    = "worker"    // any of the run
	Agents    = "agents"    // outside of the run, which take prompts from the gateway
	Producers = "producers" // which put trajectories into the buffer
	NATS      = "nats"
	Learner   = "learner" // slower than the workers
)

// Reasons of the buffer for a batch that is not ready.
const (
	GroupsMissing      = "GROUPS_MISSING"       // samples of them have not arrived
	NextAttempt        = "NEXT_ATTEMPT"         // groups failed, and the scheduler issues them again
	WeightsNotRecorded = "WEIGHTS_NOT_RECORDED" // the samples name weights whose digest is unknown
	LedgerClosed       = "LEDGER_CLOSED"        // nothing is ingested until the scheduler opens it
	EqualRewards       = "EQUAL_REWARDS"        // dynamic sampling leaves out what is sampled
	IngestFails        = "INGEST_FAILS"         // samples arrive, and the buffer can't write them
)

// Reasons of the scheduler.
const (
	NoAnswer           = "NO_ANSWER" // of a service or NATS; of the controller too
	QueueFull          = "QUEUE_FULL"
	Paused             = "PAUSED"
	WorkerLoading      = "WORKER_LOADING"
	WorkerUnregistered = "WORKER_UNREGISTERED"
	WorkerStarting     = "WORKER_STARTING"
	WorkerAwaited      = "WORKER_AWAITED" // that an operator starts
	WorkerRestarting   = "WORKER_RESTARTING"
	WorkerStopped      = "WORKER_STOPPED"
	WorkerInIO         = "WORKER_IN_IO"
	WorkerSilent       = "WORKER_SILENT"
	WorkerThrottled    = "WORKER_THROTTLED" // by a limit on its CPU time
	DatabaseBlocked    = "DATABASE_BLOCKED" // another session of PostgreSQL holds a lock
	WeightsRefused     = "WEIGHTS_REFUSED"  // a worker could not load them
)

// ServiceStopped is of `rollout explain`: the process of a service is stopped by a signal.
const ServiceStopped = "SERVICE_STOPPED"

// Reasons of the gateway.
const (
	WorkersMissing = "WORKERS_MISSING" // no inference worker is up
	WorkersFailed  = "WORKERS_FAILED"
	SessionsOpen   = "SESSIONS_OPEN"
	NoAgent        = "NO_AGENT"
	NotWithWorkers = "NOT_WITH_WORKERS" // groups are on the work stream, or were lost there
)

// Reasons of the workers.
const (
	EnginePaused    = "ENGINE_PAUSED"
	Generate        = "GENERATE"
	RewardCall      = "REWARD_CALL"
	ToolCall        = "TOOL_CALL"
	EnvironmentStep = "ENVIRONMENT_STEP"
	// EnvironmentWorker: an environment worker has not answered; the owner is its id.
	EnvironmentWorker = "ENVIRONMENT_WORKER"
	Publish           = "PUBLISH"
	Weights           = "WEIGHTS" // newer ones; of the gateway too
	Slot              = "SLOT"    // of the engine; of the gateway too
	Prepare           = "PREPARE"

	// Plugin begins the reasons of sidecars.
	Plugin           = "PLUGIN_"
	PluginRestarting = "PLUGIN_RESTARTING" // a sidecar has ended, and starts again
	PluginBlocked    = "PLUGIN_BLOCKED"    // a sidecar answered nothing, and was ended
	PluginLeaks      = "PLUGIN_LEAKS"      // a sidecar has more memory than its manifest allows
)

// ForDisk is the wait for space on a disk. missing: what is missing where.
func ForDisk(missing string) *waitv1.Wait {
	return &waitv1.Wait{Owner: User, Reason: rpcerr.ReasonDiskFull, Evidence: "space on the disk: " + missing, Fix: DiskFix(missing)}
}

// noInodes is what a worker writes of a disk that has free space, and no inodes for new files.
const noInodes = "no inodes are left"

// DiskFix is the fix for a full disk. missing: what is missing where.
func DiskFix(missing string) string {
	if strings.Contains(missing, noInodes) {
		return "delete files on that disk that are not needed, however small; active runs continue by themselves"
	}
	return rpcerr.Fix(rpcerr.ErrDiskFull)
}
