package explain

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

var update = flag.Bool("update", false, "update the golden file")

var noon = time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)

func ago(seconds float64) *timestamppb.Timestamp {
	return timestamppb.New(noon.Add(-time.Duration(seconds * float64(time.Second))))
}

// running is a healthy run at step 11 of 40 that leases the batch of step 12.
func running() State {
	return State{Time: noon, Status: &runv1.RunStatus{
		Run: &runv1.Run{
			RunId: "run-1", Name: "addition", State: runv1.RunState_RUN_STATE_RUNNING, Step: 11, TotalSteps: 40, Directory: "/state/runs/run-1", Incarnation: 1,
		},
		Phase: "LEASING", Queues: &runv1.Queues{InFlight: 3, Ready: 1}, Cursor: &runv1.Cursor{Position: 98},
		Workers: []*runv1.Worker{
			{WorkerId: "inference-0", Kind: "inference", Healthy: true, Pid: 100, WeightsVersion: 11},
			{WorkerId: "inference-2", Kind: "inference", Healthy: true, Pid: 102, WeightsVersion: 11},
			{WorkerId: "learner-0", Kind: "learner", Healthy: true, Pid: 103},
		},
		Waits: []*waitv1.Wait{lacks(47)},
	}, Missing: []*bufferv1.GroupRecord{open(88), open(91), open(97)}}
}

func waiting(owner, reason string, seconds float64, evidence, fix string) *waitv1.Wait {
	return &waitv1.Wait{Owner: owner, Reason: reason, Since: ago(seconds), Evidence: evidence, Fix: fix}
}

// lacks is what the buffer lacks.
func lacks(seconds float64) *waitv1.Wait {
	return waiting("worker", "GROUPS_MISSING", seconds, "3 of 4 groups of step 12 (inference workers)", "")
}

// by names the workers or services that a wait is for.
func by(w *waitv1.Wait, subjects ...string) *waitv1.Wait {
	w.Subjects = subjects
	return w
}

func open(position uint64) *bufferv1.GroupRecord {
	return &bufferv1.GroupRecord{Position: position, State: bufferv1.GroupState_GROUP_STATE_OPEN}
}

func dissolved(position uint64, attempt uint32, reason string) *bufferv1.GroupRecord {
	return &bufferv1.GroupRecord{
		Position: position, State: bufferv1.GroupState_GROUP_STATE_DISSOLVED, Reason: reason,
		Key: &bufferv1.GroupKey{Attempt: attempt},
	}
}

// groups are with inference-2, in a wait as its worker reports it.
func groups(reason, owner string, seconds, limit float64, evidence string, positions ...uint64) *waitv1.Wait {
	w := by(waiting(owner, reason, seconds, evidence, "a fix of the worker"), "inference-2")
	w.LimitSeconds, w.Positions, w.Groups = limit, positions, uint32(len(positions))
	return w
}

// failures are attempts that failed on inference-2, as its worker reports them.
func failures(reason string, seconds float64, count uint32, evidence string, positions ...uint64) *waitv1.Wait {
	w := by(waiting("judge.py:judge", reason, seconds, evidence, "correct the cause"), "inference-2")
	w.Positions, w.Failures = positions, count
	return w
}

// withEnvironment adds an environment worker.
func withEnvironment(s *State) {
	s.Status.Workers = append(s.Status.Workers, &runv1.Worker{WorkerId: "environment-0", Kind: "environment", Healthy: true, Pid: 104})
}

// with puts groups into inference-2.
func with(waits ...*waitv1.Wait) func(*State) {
	return func(s *State) { s.Status.Workers[1].Waits = waits }
}

// external is a run whose groups agents sample, with waits of the gateway.
func external(waits ...*waitv1.Wait) func(*State) {
	return phase("LEASING", append([]*waitv1.Wait{waiting("agents", "GROUPS_MISSING", 400, "3 of 4 groups of step 12 (agents)", "")}, waits...)...)
}

// phase replaces the wait of the run.
func phase(name string, waits ...*waitv1.Wait) func(*State) {
	return func(s *State) { s.Status.Phase, s.Status.Waits = name, waits }
}

// hindered gives a worker a wait.
func hindered(worker int, w *waitv1.Wait) func(*State) {
	return func(s *State) { s.Status.Workers[worker].Waits = append(s.Status.Workers[worker].Waits, w) }
}

// away makes a worker absent, for this reason.
func away(worker int, owner, reason, evidence string) func(*State) {
	return func(s *State) {
		w := s.Status.Workers[worker]
		w.Healthy, w.Waits = false, nil
		absent := by(waiting(owner, reason, 20, evidence, "it ends by itself; see the output of a worker with `rollout logs worker run-1 "+w.GetWorkerId()+"`"), w.GetWorkerId())
		s.Status.Waits = append([]*waitv1.Wait{absent}, s.Status.Waits...)
	}
}

func ended(state runv1.RunState, reason, message string, events ...*eventv1.Event) func(*State) {
	return func(s *State) {
		s.Status = &runv1.RunStatus{Run: &runv1.Run{
			RunId: "run-1", Name: "addition", State: state, Reason: reason, Message: message, Step: 11, TotalSteps: 40, EndTime: ago(60),
		}}
		s.Missing, s.Events, s.Failures = nil, events, events
	}
}

func failure(service, message, lines string) *eventv1.Event {
	return &eventv1.Event{
		Kind: "worker.exited", Level: eventv1.Level_LEVEL_ERROR, Service: service, Message: message, Time: ago(61), Attributes: map[string]string{"last_lines": lines},
	}
}

var (
	stopped = waiting("user", "WORKER_STOPPED", 30, "the process of inference-2 (102) is stopped by a signal or a debugger", "continue it: `kill -CONT 102`")
	silent  = waiting("inference-2", "WORKER_SILENT", 0, "inference-2 is registered and does not answer within 2s: context deadline exceeded", "see its output with `rollout logs worker run-1 inference-2`")
	full    = waiting("user", "DISK_FULL", 20, "space on the disk: 10 MiB are free on /state/segments, and 200 MiB are kept as a reserve", "delete files there; the run continues by itself")
)

// throttled is the wait of a worker whose cgroup may use too little CPU.
var throttled = waiting("user", "WORKER_THROTTLED", 0, "the process of a worker (102) is throttled: its cgroup /job may use 0.2 % of a CPU", "raise the quota")

func silentStorage(s *State) {
	s.Unanswered = []*waitv1.Unanswered{{Name: "storage", Error: "look up storage in Consul: no instance is passing its health check"}}
}

// stalls are states of runs that do not move, with the reason of the root of each.
var stalls = []struct {
	name  string
	plant []func(*State)
	root  string
}{
	{"the reward hangs", []func(*State){with(groups("REWARD_CALL", "judge.py:judge", 47, 60, "the reward call to judge.py:judge has taken 47 s of 60 s", 88, 91, 97))}, "REWARD_CALL"},
	{"one reward of several hangs", []func(*State){with(groups("REWARD_CALL", "style.py:style", 55, 60, "the reward call to style.py:style has taken 55 s of 60 s", 88), groups("GENERATE", "inference-2", 3, 0, "the engine has generated for 3 s", 91, 97))}, "REWARD_CALL"},
	{"the judge endpoint is down and its calls are repeated", []func(*State){with(groups("REWARD_CALL", "reward-0", 190, 200, "the reward call to reward-0 has taken 190 s of 200 s", 88))}, "REWARD_CALL"},
	{"a tool is slow", []func(*State){with(groups("TOOL_CALL", "search", 28, 30, "the call of the tool search has taken 28 s of 30 s", 91))}, "TOOL_CALL"},
	{"a sandbox hangs", []func(*State){with(groups("TOOL_CALL", "python", 119, 120, "the call of the tool python has taken 119 s of 120 s", 91), groups("SLOT", "inference-2", 300, 0, "the groups wait for a free slot of the engine, for 300 s", 97))}, "TOOL_CALL"},
	{"an environment computes forever", []func(*State){with(groups("ENVIRONMENT_STEP", "game.py:Game", 61, 300, "the environment game.py:Game has computed a step for 61 s of 300 s", 88, 97))}, "ENVIRONMENT_STEP"},
	{"an environment worker is lost and starts again", []func(*State){
		withEnvironment, with(groups("ENVIRONMENT_WORKER", "environment-0", 61, 0, "environment-0 has not answered for 61 s", 88, 97)),
		away(3, "scheduler", "WORKER_RESTARTING", "environment-0 to be restarted (scheduler): it was ended by signal killed"),
	}, "WORKER_RESTARTING"},
	{"an environment worker is stopped", []func(*State){
		withEnvironment, with(groups("ENVIRONMENT_WORKER", "environment-0", 61, 0, "environment-0 has not answered for 61 s", 88, 97)),
		hindered(3, waiting("user", "WORKER_STOPPED", 60, "the process of environment-0 (104) is stopped by a signal or a debugger", "continue it: `kill -CONT 104`")),
	}, "WORKER_STOPPED"},
	{"an environment worker does not answer", []func(*State){
		withEnvironment, with(groups("ENVIRONMENT_WORKER", "environment-0", 61, 0, "environment-0 has not answered for 61 s", 88, 97)),
	}, "ENVIRONMENT_WORKER"},
	{"the reward raises for the missing prompts", []func(*State){with(
		groups("REWARD_CALL", "judge.py:judge", 1, 60, "the reward call to judge.py:judge has taken 1 s of 60 s", 97),
		failures("REWARD_RAISED", 3, 5, "5 attempts failed on inference-2: judge.py:12: KeyError: 'unit'", 88, 91),
	)}, "REWARD_RAISED"},
	{"the reward failed often for a reason that holds no more", []func(*State){with(
		groups("GENERATE", "inference-2", 1, 0, "the engine has generated for 1 s", 97),
		failures("REWARD_TIMEOUT", 5, 2, "2 attempts failed on inference-2: the judge takes longer than 1 s", 88, 91, 97),
		failures("REWARD_RAISED", 90, 400, "400 attempts failed on inference-2: no module named sympy", 60, 61, 62, 63, 64, 65, 88),
	)}, "REWARD_TIMEOUT"},
	{"another worker has failed at the missing prompts since", []func(*State){
		with(failures("REWARD_RAISED", 90, 4, "4 attempts failed on inference-2: no module named sympy", 88, 91)),
		hindered(0, failures("REWARD_TIMEOUT", 5, 2, "2 attempts failed on inference-0: the judge takes longer than 1 s", 88, 91, 97)),
	}, "REWARD_TIMEOUT"},
	{"a call hangs after failures", []func(*State){with(
		groups("REWARD_CALL", "judge.py:judge", 47, 60, "the reward call to judge.py:judge has taken 47 s of 60 s", 97),
		failures("REWARD_RAISED", 90, 4, "4 attempts failed on inference-2: no module named sympy", 88, 91),
	)}, "REWARD_CALL"},
	{"groups failed that the learner does not wait for", []func(*State){with(
		groups("GENERATE", "inference-2", 140, 0, "the engine has generated for 140 s", 97),
		failures("REWARD_RAISED", 90, 4, "4 attempts failed on inference-2: no module named sympy", 60, 61),
	)}, "GENERATE"},
	{"the next attempt of failed groups is issued", []func(*State){
		phase("LEASING", waiting("scheduler", "NEXT_ATTEMPT", 3, "2 groups failed; the scheduler issues their next attempts", "")),
		func(s *State) { s.Missing = []*bufferv1.GroupRecord{dissolved(88, 2, "REWARD_RAISED")} },
		with(failures("REWARD_RAISED", 3, 2, "2 attempts failed on inference-2: judge.py:12: KeyError: 'unit'", 88)),
	}, "REWARD_RAISED"},
	{"a long completion", []func(*State){with(groups("GENERATE", "inference-2", 140, 0, "the engine has generated for 140 s", 97))}, "GENERATE"},
	{"the engine makes no token", []func(*State){with(groups("GENERATE", "inference-2", 3700, 0, "the engine has generated for 3700 s", 88, 91, 97))}, "GENERATE"},
	{"no slots are free", []func(*State){with(groups("SLOT", "inference-2", 90, 0, "the groups wait for a free slot of the engine, for 90 s", 91, 97))}, "SLOT"},
	{"samples cannot be published", []func(*State){with(groups("PUBLISH", "nats", 40, 0, "the samples are finished, and NATS or the storage service has not accepted them for 40 s", 88, 91))}, "PUBLISH"},
	{"weights do not arrive", []func(*State){with(groups("WEIGHTS", "learner-controller", 35, 0, "inference-2 has weights version 11 and waits for newer ones, for 35 s", 88, 91, 97))}, "WEIGHTS"},
	{"the buffer does not say which samples are missing", []func(*State){with(groups("PREPARE", "buffer", 33, 0, "inference-2 asks the buffer which samples it has, for 33 s", 88))}, "PREPARE"},
	{"an inference worker is stopped", []func(*State){hindered(1, stopped), hindered(1, silent)}, "WORKER_STOPPED"},
	{"an inference worker hangs", []func(*State){hindered(1, silent)}, "WORKER_SILENT"},
	{"a worker waits for a dead network file system", []func(*State){
		hindered(1, waiting("user", "WORKER_IN_IO", 0, "the process of inference-2 (102) waits in the kernel, for a disk or a network file system", "check the disks")), hindered(1, silent),
	}, "WORKER_IN_IO"},
	{"an engine was paused and not resumed", []func(*State){
		hindered(1, waiting("learner-controller", "ENGINE_PAUSED", 0, "inference-2 samples nothing: its engine is paused (ResumeEngine)", "call ResumeEngine")),
	}, "ENGINE_PAUSED"},
	{"groups are with no worker", nil, "NOT_WITH_WORKERS"},
	{"nothing is issued", []func(*State){func(s *State) { s.Status.Queues = &runv1.Queues{Ready: 1}; s.Missing = nil }}, "NOT_ISSUED"},
	{"inference workers load the model", []func(*State){away(0, "worker", "WORKER_LOADING", "inference-0 to load the model (worker process)")}, "WORKER_LOADING"},
	{"inference workers crash", []func(*State){
		away(0, "scheduler", "WORKER_RESTARTING", "inference-0 to be restarted (scheduler): it exited with code 1"),
		func(s *State) {
			s.Status.Workers[0].Restarts = 4
			s.Logs = map[string][]string{"inference-0": {"CUDA error: out of memory"}}
		},
	}, "WORKER_OUTPUT"},
	{"no GPU is free", []func(*State){
		away(0, "worker", "WORKER_LOADING", "inference-0 to load the model (worker process)"),
		func(s *State) {
			s.Logs = map[string][]string{"inference-0": {"RuntimeError: No CUDA GPUs are available"}}
		},
	}, "WORKER_OUTPUT"},
	{"a worker left the registry", []func(*State){away(0, "worker", "WORKER_UNREGISTERED", "inference-0 to register again or exit: it left the registry (worker process)")}, "WORKER_UNREGISTERED"},
	{"the learner has not registered", []func(*State){phase(""), away(2, "worker", "WORKER_LOADING", "learner-0 to load the model (worker process)")}, "WORKER_LOADING"},
	{"the learner is restarted", []func(*State){
		phase("RECOVERING", waiting("scheduler", "RECOVERING", 9, "a learner worker (scheduler restarts it)", "")),
		away(2, "scheduler", "WORKER_RESTARTING", "learner-0 to be restarted (scheduler): it exited with signal 9"),
	}, "WORKER_RESTARTING"},
	{"the learner is stopped", []func(*State){
		phase("TRAINING", by(waiting("learner-0", "TRAINING", 30, "learner-0 to train: 3 of 8 micro-batches of step 12 are done", ""), "learner-0")),
		hindered(2, waiting("user", "WORKER_STOPPED", 0, "the process of learner-0 (103) is stopped by a signal or a debugger", "continue it: `kill -CONT 103`")),
	}, "WORKER_STOPPED"},
	{"the learner trains slowly", []func(*State){
		phase("TRAINING", by(waiting("learner-0", "TRAINING", 600, "learner-0 to train: 3 of 8 micro-batches of step 12 are done", ""), "learner-0")),
		hindered(2, by(waiting("learner-0", "TRAIN", 600, "learner-0 is training step 12 on 64 samples, for 600 s", "it ends by itself"), "learner-0")),
	}, "TRAIN"},
	{"the learner is between two calls", []func(*State){phase("TRAINING", by(waiting("learner-0", "TRAINING", 600, "learner-0 to train: 8 of 8 micro-batches of step 12 are done", ""), "learner-0"))}, "TRAINING"},
	{"a worker cannot load the new weights", []func(*State){
		phase("DELIVERING", by(waiting("inference-2", "DELIVERING", 40, "inference-2 to load weights version 12", ""), "inference-2")), hindered(1, silent),
	}, "WORKER_SILENT"},
	{"a rank of the learner is stopped before the first micro-batch", []func(*State){
		phase("TRAINING"),
		hindered(2, waiting("user", "WORKER_STOPPED", 0, "process 104 of learner-0 (python -m rollout_workers.learner.ranks 1 2) is stopped by a signal or a debugger", "continue it: `kill -CONT 104`")),
	}, "WORKER_STOPPED"},
	{"the learner has trained for long without a micro-batch", []func(*State){
		phase("TRAINING"), hindered(2, by(waiting("learner-0", "TRAIN", 90, "learner-0 is training step 12 on 64 samples, for 90 s", "it ends by itself"), "learner-0")),
	}, "TRAIN"},
	{"the process of a reward is stopped", []func(*State){
		with(groups("REWARD_CALL", "judge.py:judge", 8, 60, "the reward call to judge.py:judge has taken 8 s of 60 s", 88, 91, 97)),
		hindered(1, waiting("user", "WORKER_STOPPED", 0, "process 105 of inference-2 (python -m rollout.hosting.child) is stopped by a signal or a debugger", "continue it: `kill -CONT 105`")),
	}, "WORKER_STOPPED"},
	{"all rewards are equal", []func(*State){
		with(groups("GENERATE", "inference-2", 1, 0, "the engine has generated for 1 s", 88, 91, 97)),
		phase("LEASING", lacks(47), waiting("reward", "EQUAL_REWARDS", 40, "groups whose rewards differ: in 448 of the 448 groups drawn for step 12 all rewards were equal", "check the reward")),
	}, "EQUAL_REWARDS"},
	{"all rewards are equal, and the engine hangs", []func(*State){
		with(groups("GENERATE", "inference-2", 140, 0, "the engine has generated for 140 s", 88, 91, 97)),
		phase("LEASING", lacks(47), waiting("reward", "EQUAL_REWARDS", 40, "groups whose rewards differ: in 8 of the 8 groups drawn for step 12 all rewards were equal", "check the reward")),
	}, "GENERATE"},
	{"the database of the buffer is locked", []func(*State){phase("LEASING", lacks(47), waiting("buffer", "INGEST_FAILS", 40, "the buffer to write the samples that have arrived, which fails: another process has locked the database for ten seconds", "end that process"))}, "INGEST_FAILS"},
	{"the reward hangs in an evaluation", []func(*State){
		phase("EVALUATING", by(waiting("inference-0", "EVALUATING", 90, "inference-0 to complete the held-out prompts", ""), "inference-0")),
		hindered(0, groups("SLOT", "inference-0", 95, 0, "the groups wait for a free slot of the engine, for 95 s", 99)),
		hindered(0, by(waiting("judge.py:judge", "REWARD_CALL", 88, "the reward call to judge.py:judge has taken 88 s of 300 s", "see why it is slow"), "inference-0")),
	}, "REWARD_CALL"},
	{"the held-out prompts take long", []func(*State){phase("EVALUATING", by(waiting("inference-0", "EVALUATING", 90, "inference-0 to complete the held-out prompts", ""), "inference-0"))}, "EVALUATING"},
	{"a snapshot takes long", []func(*State){phase("SNAPSHOTTING", by(waiting("snapshot", "SNAPSHOTTING", 90, "snapshot to store the files", "see its log"), "snapshot"))}, "SNAPSHOTTING"},
	{"a commit takes long", []func(*State){phase("COMMITTING", by(waiting("buffer", "COMMITTING", 9, "buffer to commit the step", ""), "buffer"))}, "COMMITTING"},
	{"the snapshot service hangs", []func(*State){
		phase("SNAPSHOTTING", by(waiting("snapshot", "SNAPSHOTTING", 90, "snapshot to store the files", ""), "snapshot")),
		func(s *State) {
			s.Unanswered = []*waitv1.Unanswered{{Name: "snapshot", Error: "context deadline exceeded"}}
		},
	}, "NO_ANSWER"},
	{"the snapshot service waits for the storage service, which is stopped", []func(*State){
		phase("SNAPSHOTTING", by(waiting("snapshot", "SNAPSHOTTING", 45, "snapshot to store the files", ""), "snapshot")), silentStorage,
		func(s *State) {
			s.Processes = map[string]Process{"storage": {PID: 4711, Address: "127.0.0.1:7301", Stopped: true}}
		},
	}, "SERVICE_STOPPED"},
	{"the snapshot service waits for the storage service, which hangs", []func(*State){
		phase("SNAPSHOTTING", by(waiting("snapshot", "SNAPSHOTTING", 45, "snapshot to store the files", ""), "snapshot")), silentStorage,
		func(s *State) {
			s.Processes = map[string]Process{"storage": {PID: 4711, Address: "127.0.0.1:7301"}}
		},
	}, "NO_ANSWER"},
	{"the snapshot service waits for the storage service, which is on another host", []func(*State){
		phase("SNAPSHOTTING", by(waiting("snapshot", "SNAPSHOTTING", 45, "snapshot to store the files", ""), "snapshot")), silentStorage,
	}, "NO_ANSWER"},
	{"the storage service is stopped, and the run does not need it", []func(*State){
		with(groups("REWARD_CALL", "judge.py:judge", 47, 60, "the reward call to judge.py:judge has taken 47 s of 60 s", 88)), silentStorage,
	}, "REWARD_CALL"},
	{"the buffer is stopped", []func(*State){
		phase("LEASING", by(waiting("buffer", "NO_ANSWER", 15, "buffer to answer: context deadline exceeded", "check that the service runs"), "buffer")),
		func(s *State) {
			s.Unanswered = []*waitv1.Unanswered{{Name: "buffer", Error: "context deadline exceeded"}}
			s.Processes = map[string]Process{"buffer": {PID: 4712, Address: "127.0.0.1:7302", Stopped: true}}
		},
	}, "SERVICE_STOPPED"},
	{"the scheduler is stopped", []func(*State){func(s *State) {
		*s = State{Time: noon, Unanswered: []*waitv1.Unanswered{{Name: "scheduler", Error: "context deadline exceeded"}},
			Processes: map[string]Process{"scheduler": {PID: 4713, Address: "127.0.0.1:7303", Stopped: true}}}
	}}, "SERVICE_STOPPED"},
	{"another session of PostgreSQL has a lock", []func(*State){phase("LEASING",
		by(waiting("user", "DATABASE_BLOCKED", 20, "the database of buffer, where a statement waits for a lock on the table rollout_buffer.sample of PostgreSQL, which the session with pid 99 holds (application psql)", "end that session"), "buffer"),
		lacks(20), waiting("buffer", "INGEST_FAILS", 17, "the buffer to write the samples that have arrived", "check"))}, "DATABASE_BLOCKED"},
	{"an inference worker is throttled", []func(*State){
		with(groups("GENERATE", "inference-2", 140, 0, "the engine has generated for 140 s", 97)), hindered(1, throttled), hindered(1, silent),
	}, "WORKER_THROTTLED"},
	{"a throttled worker left the registry", []func(*State){
		away(0, "worker", "WORKER_UNREGISTERED", "inference-0 to register again or exit: it left the registry (worker process)"), hindered(0, throttled),
	}, "WORKER_THROTTLED"},
	{"the first groups are sampled", []func(*State){phase("LEASING")}, "NOTHING"},
	{"the disk of a worker is full", []func(*State){hindered(1, by(waiting("user", "DISK_FULL", 20, "the samples of inference-2 are not accepted, and sampled again: 10 MiB are free", "free some space"), "inference-2"))}, "DISK_FULL"},
	{"no weights of the newest version fit on the disk of a worker", []func(*State){
		phase("DELIVERING", by(waiting("inference-2", "DELIVERING", 40, "inference-2 to load weights version 12", ""), "inference-2")),
		hindered(1, by(waiting("user", "DISK_FULL", 20, "inference-2 could not load weights version 12, and tries again: 10 MiB are free", "free some space"), "inference-2")),
	}, "DISK_FULL"},
	{"the disk of the segments is full", []func(*State){phase("LEASING", full, lacks(20))}, "DISK_FULL"},
	{"the disk is full and the run paused itself", []func(*State){func(s *State) { s.Status.Run.State = runv1.RunState_RUN_STATE_PAUSED }, phase("LEASING", full)}, "DISK_FULL"},
	{"NATS is down", []func(*State){
		phase("LEASING", waiting("nats", "NO_ANSWER", 15, "NATS to answer again (its servers): no server of nats.url answers; run `rollout doctor` for details", ""), lacks(15)),
	}, "NO_ANSWER"},
	{"publishing prompts is not acknowledged", []func(*State){phase("LEASING", waiting("nats", "NO_ANSWER", 15, "publishing prompt groups (NATS): no answer yet", ""))}, "NO_ANSWER"},
	{"the buffer is down", []func(*State){
		phase("", by(waiting("buffer", "NO_ANSWER", 15, "the ledger's changes (buffer): connection refused", ""), "buffer")),
		func(s *State) {
			s.Unanswered = []*waitv1.Unanswered{{Name: "buffer", Error: "connection refused"}}
		},
	}, "NO_ANSWER"},
	{"publishing hangs because the buffer does", []func(*State){
		phase("", by(waiting("nats", "NO_ANSWER", 15, "publishing prompt groups (NATS, buffer): no answer yet", ""), "nats", "buffer")),
		func(s *State) {
			s.Unanswered = []*waitv1.Unanswered{{Name: "buffer", Error: "context deadline exceeded"}}
		},
	}, "NO_ANSWER"},
	{"the controller is down", []func(*State){phase("", waiting("learner-controller", "NO_ANSWER", 15, "the controller to answer again (learner-controller): connection refused", ""))}, "NO_ANSWER"},
	{"the queue is full", []func(*State){
		phase("LEASING", waiting("learner", "QUEUE_FULL", 15, "the learner to take samples (learner): no more groups of 64 KiB are issued above 1 MiB (limits.queue_bytes)", "raise `limits.queue_bytes`"),
			lacks(15)),
	}, "QUEUE_FULL"},
	{"the scheduler is down", []func(*State){func(s *State) {
		*s = State{Time: noon, Unanswered: []*waitv1.Unanswered{{Name: "scheduler", Error: "connection refused"}}}
	}}, "NO_ANSWER"},
	{"the database is down, and so the scheduler is unhealthy", []func(*State){func(s *State) {
		*s = State{Time: noon, Unanswered: []*waitv1.Unanswered{{Name: "scheduler", Error: "no instance is passing its health check"}, {Name: "database", Error: "the database does not answer"}},
			Processes: map[string]Process{"scheduler": {PID: 4713, Address: "127.0.0.1:7303"}}}
	}}, "NO_ANSWER"},
	{"the database is down", []func(*State){func(s *State) {
		*s = State{Time: noon, Unanswered: []*waitv1.Unanswered{{Name: "database", Error: "the database does not answer"}}}
	}}, "NO_ANSWER"},
	{"the registry is down", []func(*State){func(s *State) {
		*s = State{Time: noon, Unanswered: []*waitv1.Unanswered{{Name: "consul", Error: "look up scheduler in Consul 127.0.0.1:8500: connection refused"}}}
	}}, "NO_ANSWER"},
	{"the run is paused", []func(*State){
		func(s *State) { s.Status.Run.State = runv1.RunState_RUN_STATE_PAUSED },
		phase("LEASING", waiting("user", "PAUSED", 300, "you to resume the run (it was paused by request)", "rollout runs resume run-1")),
	}, "PAUSED"},
	{"a gradient was refused", []func(*State){
		func(s *State) { s.Status.Run.State = runv1.RunState_RUN_STATE_PAUSED },
		phase("", waiting("user", "EXPLODING_GRADIENT", 300, "you to start a run with other settings: the gradient has norm 1e9", "rollout runs resume run-1")),
	}, "EXPLODING_GRADIENT"},
	{"no agent takes prompts", []func(*State){external(waiting("agents", "NO_AGENT", 400, "no agent asks for prompts, and none has since the gateway started", "start an agent"))}, "NO_AGENT"},
	{"agents close no sessions, and the buffer has not said what it lacks", []func(*State){phase("", waiting("agents", "SESSIONS_OPEN", 400, "agents have the sessions of 3 prompt groups and have not closed all of them", "see why the agents close no sessions"))}, "SESSIONS_OPEN"},
	{"agents close no sessions", []func(*State){external(waiting("agents", "SESSIONS_OPEN", 400, "agents have the sessions of 3 prompt groups and have not closed all of them", "see why the agents close no sessions"))}, "SESSIONS_OPEN"},
	{"agents wait for a slot of an engine", []func(*State){external(
		waiting("agents", "SESSIONS_OPEN", 400, "agents have the sessions of 3 prompt groups and have not closed all of them", "see why the agents close no sessions"),
		waiting("worker", "SLOT", 40, "12 requests wait for a free slot of the 2 inference workers", "more slots (engine.slots)"),
	)}, "SLOT"},
	{"agents have no engine", []func(*State){
		external(waiting("worker", "WORKERS_MISSING", 40, "agents ask for prompts, and get none before an inference worker is up", "see the workers")),
		away(0, "worker", "WORKER_LOADING", "inference-0 to load the model (worker process)"),
	}, "WORKER_LOADING"},
	{"the gateway of the agents is down", []func(*State){external(by(waiting("rollout-gateway", "NO_ANSWER", 0, "the gateway, from which agents take prompts, to answer: connection refused", ""), "rollout-gateway"))}, "NO_ANSWER"},
	{"a group failed and is issued again", []func(*State){
		phase("LEASING", waiting("scheduler", "NEXT_ATTEMPT", 4, "the next attempt of 1 dissolved groups (scheduler)", "")),
		func(s *State) { s.Missing = []*bufferv1.GroupRecord{dissolved(88, 1, "REWARD_RAISED")} },
	}, "ISSUING_AGAIN"},
	{"the digest of the weights is not recorded", []func(*State){phase("LEASING", waiting("learner-controller", "WEIGHTS_NOT_RECORDED", 4, "the digest of the weights that sampled 2 groups (learner-controller)", ""))}, "WEIGHTS_NOT_RECORDED"},
	{"the ledger is closed", []func(*State){phase("LEASING", lacks(9), waiting("scheduler", "LEDGER_CLOSED", 9, "the ledger to be opened again: ingest is stopped (scheduler)", ""))}, "LEDGER_CLOSED"},
	{"a producer puts no rows", []func(*State){phase("LEASING", waiting("producers", "GROUPS_MISSING", 9, "3 of 4 groups of step 12 (workers that read rows, or external producers)", ""))}, "GROUPS_MISSING"},
	{"nothing is wrong", []func(*State){phase("COMMITTING")}, "NOTHING"},
	{"the control plane was killed", []func(*State){func(s *State) {
		s.Dead, s.Events = true, []*eventv1.Event{{Kind: "step.committed", Time: ago(120), Service: "learner-controller"}}
	}}, "NO_CONTROL_PLANE"},
	{"the control plane was stopped", []func(*State){ended(runv1.RunState_RUN_STATE_INTERRUPTED, "", "the control plane stopped")}, "INTERRUPTED"},
	{"the run failed: a worker crashes", []func(*State){ended(runv1.RunState_RUN_STATE_FAILED, "WORKER_CRASH_LOOP", "inference-0 left 6 times within ten minutes with code 1; its last lines:\nMemoryError")}, "WORKER_CRASH_LOOP"},
	{"the run failed after an error", []func(*State){ended(runv1.RunState_RUN_STATE_FAILED, "INTERNAL", "the step could not be made",
		failure("scheduler", "learner-0 exited with code 1", "RuntimeError: CUDA error: device-side assert"))}, "LAST_ERROR"},
	{"every group was excluded", []func(*State){ended(runv1.RunState_RUN_STATE_FAILED, "EVERY_GROUP_EXCLUDED", "step 12: every group of the step was excluded",
		&eventv1.Event{Kind: "group.excluded", Level: eventv1.Level_LEVEL_WARN, Service: "scheduler", Time: ago(62), Attributes: map[string]string{"last_reason": "REWARD_RAISED"}, Message: "group 0/3 is excluded: 3 attempts failed, the last one with REWARD_RAISED"},
		&eventv1.Event{Kind: "phase", Level: eventv1.Level_LEVEL_ERROR, Service: "learner-controller", Message: "phase FAILED", Time: ago(61)})}, "REWARD_RAISED"},
	{"every group was excluded, and a worker knows why", []func(*State){ended(runv1.RunState_RUN_STATE_FAILED, "EVERY_GROUP_EXCLUDED", "step 12: every group of the step was excluded",
		&eventv1.Event{Kind: "log", Level: eventv1.Level_LEVEL_WARN, Service: "inference-worker/inference-0", Time: ago(63), Message: "the teacher at http://teacher/v1/completions answers 429: slow down"},
		&eventv1.Event{Kind: "group.excluded", Level: eventv1.Level_LEVEL_WARN, Service: "scheduler", Time: ago(62), Attributes: map[string]string{"last_reason": "TEACHER_BUSY"}, Message: "group 0/3 is excluded: 3 attempts failed, the last one with TEACHER_BUSY"})}, "TEACHER_BUSY"},
	{"the bucket refused the credentials", []func(*State){ended(runv1.RunState_RUN_STATE_FAILED, "BLOB_DENIED", "the object store http://s3:9000 (bucket \"runs\") refused the credentials to put cas/d6/blake3-d6: HTTP 403")}, "BLOB_DENIED"},
	{"a gate stopped the run", []func(*State){ended(runv1.RunState_RUN_STATE_SUCCEEDED, "STOPPED_BY_GATE", "gate good: `eval/reward >= 0.8` holds at step 12: eval/reward is 0.81")}, "STOPPED_BY_GATE"},
	{"the run was cancelled", []func(*State){ended(runv1.RunState_RUN_STATE_CANCELLED, "", "")}, "CANCELLED"},
	{"the run was cancelled, and took a snapshot", []func(*State){ended(runv1.RunState_RUN_STATE_CANCELLED, "", "cancelled by request after step 11")}, "CANCELLED"},
	{"the run was cancelled before a step", []func(*State){ended(runv1.RunState_RUN_STATE_CANCELLED, "", "cancelled by request while it started")}, "CANCELLED"},
	{"the run succeeded", []func(*State){ended(runv1.RunState_RUN_STATE_SUCCEEDED, "", ""), func(s *State) { s.Status.Run.Step = 40 }}, "SUCCEEDED"},
}

func planted(plant []func(*State)) State {
	s := running()
	for _, p := range plant {
		p(&s)
	}
	return s
}

func TestTheRootOfEachStallIsNamed(t *testing.T) {
	var all strings.Builder
	for _, c := range stalls {
		found := Of(planted(c.plant))
		if len(found.GetChain()) == 0 {
			t.Errorf("%s: no chain", c.name)
			continue
		}
		root := found.GetChain()[len(found.GetChain())-1]
		if root.GetReason() != c.root {
			t.Errorf("%s: the root is %s, not %s", c.name, root.GetReason(), c.root)
		}
		fmt.Fprintf(&all, "# %s\n", c.name)
		for _, w := range found.GetChain() {
			fmt.Fprintf(&all, "%s %s: %s\n", w.GetOwner(), w.GetReason(), w.GetEvidence())
			if w.GetFix() != "" {
				fmt.Fprintf(&all, "  fix: %s\n", w.GetFix())
			}
		}
		for _, w := range found.GetOthers() {
			fmt.Fprintf(&all, "also %s: %s\n", w.GetReason(), w.GetEvidence())
		}
		all.WriteString("\n")
	}
	const file = "testdata/stalls.text"
	if *update {
		if err := os.WriteFile(file, []byte(all.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), all.String()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}

// Every link has an owner, a reason, and evidence, and every chain has a fix, except those of waits
// that end without one.
func TestEveryWaitIsComplete(t *testing.T) {
	selfEnding := map[string]bool{"NOTHING": true, "SUCCEEDED": true, "STOPPED_BY_GATE": true, "GROUPS_MISSING": true, "WEIGHTS_NOT_RECORDED": true, "LEDGER_CLOSED": true}
	for _, c := range stalls {
		fix := false
		for _, w := range Of(planted(c.plant)).GetChain() {
			if w.GetOwner() == "" || w.GetReason() == "" || w.GetEvidence() == "" {
				t.Errorf("%s: incomplete: %v", c.name, w)
			}
			fix = fix || w.GetFix() != ""
		}
		if !fix && !selfEnding[c.root] {
			t.Errorf("%s: no fix", c.name)
		}
	}
}

// No fix promises that a wait ends without help once it has lasted for an hour.
func TestAnOldWaitHasAFix(t *testing.T) {
	young := 0
	for _, c := range stalls {
		promise := func(w *waitv1.Wait) bool {
			return strings.Contains(w.GetFix(), "by itself") || strings.Contains(w.GetFix(), "by themselves")
		}
		state := planted(c.plant)
		for _, w := range Of(state).GetChain() {
			if promise(w) {
				young++
			}
		}
		state.Time = noon.Add(time.Hour)
		before := fmt.Sprint(state.Status)
		for _, w := range Of(state).GetChain() {
			if promise(w) {
				t.Errorf("%s: after an hour the fix is %q", c.name, w.GetFix())
			}
		}
		if after := fmt.Sprint(state.Status); after != before {
			t.Errorf("%s: the state was changed", c.name)
		}
	}
	if young == 0 {
		t.Error("no young wait has a fix that promises this")
	}
}
