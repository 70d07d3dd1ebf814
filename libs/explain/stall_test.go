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
		Waits: []*waitv1.Wait{wait("inference workers", "LEASING", 47, "3 of 4 groups of step 12 (inference workers)", "")},
	}, Missing: []*bufferv1.GroupRecord{open(88), open(91), open(97)}}
}

func wait(owner, reason string, seconds float64, evidence, fix string) *waitv1.Wait {
	return &waitv1.Wait{Owner: owner, Reason: reason, Since: ago(seconds), Evidence: evidence, Fix: fix}
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

func doing(what, name string, seconds, limit float64, positions ...uint64) *waitv1.Activity {
	return &waitv1.Activity{Doing: what, Name: name, Since: ago(seconds), LimitSeconds: limit, Positions: positions, Groups: uint32(len(positions))}
}

// with puts activities into inference-2.
func with(activities ...*waitv1.Activity) func(*State) {
	return func(s *State) { s.Status.Workers[1].InFlight = activities }
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
		w.Healthy, w.InFlight = false, nil
		s.Status.Waits = append([]*waitv1.Wait{wait(owner, reason, 20, evidence, "")}, s.Status.Waits...)
	}
}

func ended(state runv1.RunState, reason, message string, events ...*eventv1.Event) func(*State) {
	return func(s *State) {
		s.Status = &runv1.RunStatus{Run: &runv1.Run{
			RunId: "run-1", Name: "addition", State: state, Reason: reason, Message: message, Step: 11, TotalSteps: 40, EndTime: ago(60),
		}}
		s.Missing, s.Events = nil, events
	}
}

func failure(service, message, lines string) *eventv1.Event {
	return &eventv1.Event{
		Kind: "worker.exited", Level: eventv1.Level_LEVEL_ERROR, Service: service, Message: message, Time: ago(61), Attributes: map[string]string{"last_lines": lines},
	}
}

var (
	stopped = wait("user", "WORKER_STOPPED", 30, "the process of inference-2 (102) is stopped by a signal or a debugger", "continue it: `kill -CONT 102`")
	silent  = wait("inference-2", "WORKER_SILENT", 0, "inference-2 is registered and does not answer within 2s: context deadline exceeded", "see its output with `rollout logs worker run-1 inference-2`")
	full    = wait("user", "DISK_FULL", 20, "space on the disk: 10 MiB are free on /state/segments, and 200 MiB are kept as a reserve", "delete files there; the run continues by itself")
)

// stalls are states of runs that do not move, with the reason of the root of each.
var stalls = []struct {
	name  string
	plant []func(*State)
	root  string
}{
	{"the reward hangs", []func(*State){with(doing("REWARD", "judge.py:judge", 47, 60, 88, 91, 97))}, "REWARD_CALL"},
	{"one reward of several hangs", []func(*State){with(doing("REWARD", "style.py:style", 55, 60, 88), doing("GENERATE", "", 3, 0, 91, 97))}, "REWARD_CALL"},
	{"the judge endpoint is down and its calls are repeated", []func(*State){with(doing("REWARD", "reward-0", 190, 200, 88))}, "REWARD_CALL"},
	{"a tool is slow", []func(*State){with(doing("TOOL_CALL", "search", 28, 30, 91))}, "TOOL_CALL"},
	{"a sandbox hangs", []func(*State){with(doing("TOOL_CALL", "python", 119, 120, 91), doing("SLOT", "", 300, 0, 97))}, "TOOL_CALL"},
	{"an environment computes forever", []func(*State){with(doing("ENVIRONMENT", "game.py:Game", 61, 300, 88, 97))}, "ENVIRONMENT_STEP"},
	{"a long completion", []func(*State){with(doing("GENERATE", "", 140, 0, 97)), func(s *State) { s.Status.Workers[1].TokensPerSecond = 31 }}, "GENERATE"},
	{"the engine makes no token", []func(*State){with(doing("GENERATE", "", 3700, 0, 88, 91, 97))}, "GENERATE"},
	{"no slots are free", []func(*State){with(doing("SLOT", "", 90, 0, 91, 97))}, "SLOT"},
	{"samples cannot be published", []func(*State){with(doing("PUBLISH", "", 40, 0, 88, 91))}, "PUBLISH"},
	{"weights do not arrive", []func(*State){with(doing("WEIGHTS", "", 35, 0, 88, 91, 97))}, "WEIGHTS"},
	{"the buffer does not say which samples are missing", []func(*State){with(doing("PREPARE", "", 33, 0, 88))}, "PREPARE"},
	{"an inference worker is stopped", []func(*State){hindered(1, stopped), hindered(1, silent)}, "WORKER_STOPPED"},
	{"an inference worker hangs", []func(*State){hindered(1, silent)}, "WORKER_SILENT"},
	{"a worker waits for a dead network file system", []func(*State){
		hindered(1, wait("user", "WORKER_IN_IO", 0, "the process of inference-2 (102) waits in the kernel, for a disk or a network file system", "check the disks")), hindered(1, silent),
	}, "WORKER_IN_IO"},
	{"an engine was paused and not resumed", []func(*State){
		hindered(1, wait("learner-controller", "ENGINE_PAUSED", 0, "inference-2 samples nothing: its engine is paused (ResumeEngine)", "call ResumeEngine")),
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
		phase("RECOVERING", wait("scheduler", "RECOVERING", 9, "a learner worker (scheduler restarts it)", "")),
		away(2, "scheduler", "WORKER_RESTARTING", "learner-0 to be restarted (scheduler): it exited with signal 9"),
	}, "WORKER_RESTARTING"},
	{"the learner is stopped", []func(*State){
		phase("TRAINING", wait("learner-controller", "TRAINING", 30, "learner-0: 3 of 8 micro-batches of step 12", "")),
		hindered(2, wait("user", "WORKER_STOPPED", 0, "the process of learner-0 (103) is stopped by a signal or a debugger", "continue it: `kill -CONT 103`")),
	}, "WORKER_STOPPED"},
	{"the learner trains slowly", []func(*State){phase("TRAINING", wait("learner-controller", "TRAINING", 600, "learner-0: 3 of 8 micro-batches of step 12", ""))}, "TRAINING"},
	{"a worker cannot load the new weights", []func(*State){
		phase("DELIVERING", wait("learner-controller", "DELIVERING", 40, "inference-2 to load weights version 12", "")), hindered(1, silent),
	}, "WORKER_SILENT"},
	{"the held-out prompts take long", []func(*State){phase("EVALUATING", wait("learner-controller", "EVALUATING", 90, "inference-0 to complete the held-out prompts", ""))}, "EVALUATING"},
	{"a snapshot takes long", []func(*State){phase("SNAPSHOTTING", wait("learner-controller", "SNAPSHOTTING", 90, "snapshot to store the files", ""))}, "SNAPSHOTTING"},
	{"the disk of the segments is full", []func(*State){phase("LEASING", full, wait("inference workers", "LEASING", 20, "3 of 4 groups of step 12 (inference workers)", ""))}, "DISK_FULL"},
	{"the disk is full and the run paused itself", []func(*State){func(s *State) { s.Status.Run.State = runv1.RunState_RUN_STATE_PAUSED }, phase("LEASING", full)}, "DISK_FULL"},
	{"NATS is down", []func(*State){
		phase("LEASING", wait("nats", "NO_ANSWER", 15, "NATS to answer again (its servers): no server of nats.url answers; run `rollout doctor` for details", ""), wait("inference workers", "LEASING", 15, "3 of 4 groups of step 12 (inference workers)", "")),
	}, "NO_ANSWER"},
	{"publishing prompts is not acknowledged", []func(*State){phase("LEASING", wait("nats", "NO_ANSWER", 15, "publishing prompt groups (NATS): no answer yet", ""))}, "NO_ANSWER"},
	{"the buffer is down", []func(*State){
		phase("", wait("buffer", "NO_ANSWER", 15, "the ledger's changes (buffer): connection refused", "")),
		func(s *State) {
			s.Unanswered = []*waitv1.Unanswered{{Name: "buffer", Error: "connection refused"}}
		},
	}, "NO_ANSWER"},
	{"the controller is down", []func(*State){phase("", wait("learner-controller", "NO_ANSWER", 15, "the controller to answer again (learner-controller): connection refused", ""))}, "NO_ANSWER"},
	{"the queue is full", []func(*State){
		phase("LEASING", wait("learner", "QUEUE_FULL", 15, "the learner to take samples (learner): no more groups of 64 KiB are issued above 1 MiB (limits.queue_bytes)", "raise `limits.queue_bytes`"),
			wait("inference workers", "LEASING", 15, "3 of 4 groups of step 12 (inference workers)", "")),
	}, "QUEUE_FULL"},
	{"the scheduler is down", []func(*State){func(s *State) {
		*s = State{Time: noon, Unanswered: []*waitv1.Unanswered{{Name: "scheduler", Error: "connection refused"}}}
	}}, "NO_ANSWER"},
	{"the run is paused", []func(*State){
		func(s *State) { s.Status.Run.State = runv1.RunState_RUN_STATE_PAUSED },
		phase("LEASING", wait("user", "PAUSED", 300, "you to resume the run (it was paused by request)", "rollout runs resume run-1")),
	}, "PAUSED"},
	{"a gradient was refused", []func(*State){
		func(s *State) { s.Status.Run.State = runv1.RunState_RUN_STATE_PAUSED },
		phase("", wait("user", "EXPLODING_GRADIENT", 300, "you to start a run with other settings: the gradient has norm 1e9", "rollout runs resume run-1")),
	}, "EXPLODING_GRADIENT"},
	{"no agent takes prompts", []func(*State){phase("LEASING", wait("agents", "LEASING", 400, "3 of 4 groups of step 12 (agents)", "start an agent that takes prompts from http://127.0.0.1:7601, or see why the running ones close no sessions"))}, "GROUPS_MISSING"},
	{"a group failed and is issued again", []func(*State){
		phase("LEASING", wait("scheduler", "LEASING", 4, "the next attempt of 1 dissolved groups (scheduler)", "")),
		func(s *State) { s.Missing = []*bufferv1.GroupRecord{dissolved(88, 1, "REWARD_RAISED")} },
	}, "NEXT_ATTEMPT"},
	{"the digest of the weights is not recorded", []func(*State){phase("LEASING", wait("learner-controller", "LEASING", 4, "the digest of the weights that sampled 2 groups (learner-controller)", ""))}, "GROUPS_MISSING"},
	{"nothing is wrong", []func(*State){phase("COMMITTING")}, "NOTHING"},
	{"the control plane was killed", []func(*State){func(s *State) {
		s.Dead, s.Events = true, []*eventv1.Event{{Kind: "step.committed", Time: ago(120), Service: "learner-controller"}}
	}}, "NO_CONTROL_PLANE"},
	{"the control plane was stopped", []func(*State){ended(runv1.RunState_RUN_STATE_INTERRUPTED, "", "the control plane stopped")}, "INTERRUPTED"},
	{"the run failed: a worker crashes", []func(*State){ended(runv1.RunState_RUN_STATE_FAILED, "WORKER_CRASH_LOOP", "inference-0 left 6 times within ten minutes with code 1; its last lines:\nMemoryError")}, "WORKER_CRASH_LOOP"},
	{"the run failed after an error", []func(*State){ended(runv1.RunState_RUN_STATE_FAILED, "INTERNAL", "the step could not be made",
		failure("scheduler", "learner-0 exited with code 1", "RuntimeError: CUDA error: device-side assert"))}, "LAST_ERROR"},
	{"the run was cancelled", []func(*State){ended(runv1.RunState_RUN_STATE_CANCELLED, "", "")}, "CANCELLED"},
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
	selfEnding := map[string]bool{"NOTHING": true, "SUCCEEDED": true, "GROUPS_MISSING": true}
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
