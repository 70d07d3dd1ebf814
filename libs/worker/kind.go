package worker

import (
	"time"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/reward"
	"github.com/rollout-rl/rollout/proto/gen/names"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Kind is the Go part of a kind of worker. The Python part is the code that such a process runs
// (rollout_workers/kinds.py).
type Kind struct {
	Name string // the argument of rollout-worker; workers are named <Name>-<number>
	// Count is how many supervised workers a run has; nil for a kind that is not supervised.
	Count func(c *configv1.RunConfig) int
	// Threads are the configured CPU threads of one process (0: a share of the cores) and how many
	// processes share them. nil: one thread.
	Threads func(c *configv1.RunConfig) (configured uint32, sharers int)
	// StopGrace is the time that a process gets to finish its requests; 0 is the default of the
	// supervisor.
	StopGrace time.Duration
	// LoadsWeights: the process starts with the newest weights of the run.
	LoadsWeights bool
	// Detached: the process has no connection to NATS.
	Detached bool
}

// The kinds of workers.
var (
	Inference = Kind{
		Name: "inference", LoadsWeights: true,
		Count: func(c *configv1.RunConfig) int { // without samples the learner reads the rows itself
			if !algorithm.Samples(c) {
				return 0
			}
			return max(1, int(c.GetEngine().GetWorkers()))
		},
		Threads: func(c *configv1.RunConfig) (uint32, int) {
			return c.GetEngine().GetThreads(), max(1, int(c.GetEngine().GetWorkers()))
		},
		StopGrace: 12 * time.Second, // requests of people may take 10 s of it, groups 2 s
	}
	Learner = Kind{
		Name:  "learner",
		Count: func(*configv1.RunConfig) int { return 1 },
		Threads: func(c *configv1.RunConfig) (uint32, int) {
			return c.GetTrain().GetThreads(), max(1, int(c.GetTrain().GetRanks()))
		},
	}
	Reward = Kind{ // scores completions while others are sampled, so it shares the cores with the engines
		Name: "reward",
		Count: func(c *configv1.RunConfig) int {
			if !algorithm.Samples(c) {
				return 0
			}
			return len(reward.Models(c))
		},
		Threads: func(c *configv1.RunConfig) (uint32, int) { return 0, max(1, int(c.GetEngine().GetWorkers())) },
	}
	// Environment hosts environments for the rollout workers of other processes.
	Environment = Kind{
		Name:  "environment",
		Count: func(c *configv1.RunConfig) int { return int(c.GetMultistep().GetEnvironmentWorkers()) },
	}
	// Trackers writes metrics to the trackers of [sinks]. It is not supervised: a run does not depend
	// on it.
	Trackers = Kind{Name: "sinks", Detached: true}
)

// Kinds are all kinds. Supervisors start in this order.
var Kinds = []Kind{Learner, Inference, Reward, Environment, Trackers}

// Reserved reports whether the n-th worker of the kind only evaluates (eval.workers): the last ones
// do.
func (k Kind) Reserved(c *configv1.RunConfig, n int) bool {
	return k.Name == Inference.Name && n >= k.Count(c)-int(c.GetEval().GetWorkers())
}

// Service is the name under which workers of the kind register, and by which events name them.
func (k Kind) Service() string { return names.WorkerService(k.Name) }

// CPUThreads is the number of threads of one process on a host with so many cores. In sync mode
// engine and learner alternate, and each may use all cores; in async mode each gets half. Processes
// of one kind share theirs.
func (k Kind) CPUThreads(c *configv1.RunConfig, cores int) uint32 {
	if k.Threads == nil {
		return 1
	}
	configured, sharers := k.Threads(c)
	if configured > 0 {
		return configured
	}
	if c.GetMode() == "async" {
		cores /= 2
	}
	return uint32(max(1, cores/sharers))
}
