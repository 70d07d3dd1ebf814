// Package explain computes why a run waits, or why it ended: a chain of waits from the run to the
// root cause. It is a pure function of a State, which the caller collects from the services, or
// from the state folder of a control plane that is gone.
package explain

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/wait"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// State is what is known of a run at one time. What is missing is nil.
type State struct {
	Time       time.Time
	Name       string                  // as the caller named the run
	Status     *runv1.RunStatus        // with Worker.waits; nil: the scheduler did not answer
	Missing    []*bufferv1.GroupRecord // groups that lack samples, by position, then dissolved ones
	Events     []*eventv1.Event        // the newest of the run, oldest first
	Failures   []*eventv1.Event        // the newest warnings and errors of a run that has failed, oldest first
	Unanswered []*waitv1.Unanswered    // what was asked and did not answer
	Dead       bool                    // no control plane runs; the state was read from its folder
	Logs       map[string][]string     // last lines of the logs of workers
	Processes  map[string]Process      // of services that did not answer, by their names, if they are on this host
}

// Process is the rolloutd of a service on this host.
type Process struct {
	PID     int
	Address string // host:port
	Stopped bool   // by a signal or a debugger
}

// Of explains a state.
func Of(s State) *waitv1.Explanation {
	run := s.Status.GetRun()
	out := &waitv1.Explanation{
		RunId: run.GetRunId(), Name: run.GetName(), State: state(run.GetState()), Time: timestamppb.New(s.Time), Unanswered: s.Unanswered, Events: s.Events,
	}
	if s.Status == nil {
		out.Name, out.State = s.Name, "UNKNOWN"
	}
	e := &explainer{State: s, run: run, used: map[*waitv1.Wait]bool{}}
	switch {
	case s.Status == nil:
		e.noScheduler()
	case run.GetState() == runv1.RunState_RUN_STATE_INTERRUPTED, s.Dead && !over(run.GetState()):
		e.interrupted()
	case over(run.GetState()):
		e.ended()
	default:
		e.active()
	}
	e.due()
	out.Chain, out.Others = e.chain, e.others
	return out
}

func state(s runv1.RunState) string { return strings.TrimPrefix(s.String(), "RUN_STATE_") }

// Ended reports whether the run of a state has ended, or no control plane runs it.
func Ended(s State) bool { return s.Dead || over(s.Status.GetRun().GetState()) }

func over(s runv1.RunState) bool {
	return slices.Contains([]runv1.RunState{
		runv1.RunState_RUN_STATE_SUCCEEDED, runv1.RunState_RUN_STATE_FAILED, runv1.RunState_RUN_STATE_CANCELLED, runv1.RunState_RUN_STATE_INTERRUPTED,
	}, s)
}

// explainer builds a chain.
type explainer struct {
	State
	run    *runv1.Run
	chain  []*waitv1.Wait
	others []*waitv1.Wait
	used   map[*waitv1.Wait]bool // of the status
}

// because adds the reason of the last wait, and returns it.
func (e *explainer) because(owner, reason string, since *timestamppb.Timestamp, evidence, fix string) *waitv1.Wait {
	w := &waitv1.Wait{Owner: owner, Reason: reason, Since: since, Evidence: evidence, Fix: fix}
	e.chain = append(e.chain, w)
	return w
}

func (e *explainer) add(waits ...*waitv1.Wait) { e.chain = append(e.chain, waits...) }

// Names in State.Unanswered of what services need: Consul or the embedded registry, and PostgreSQL
// or SQLite.
const (
	Registry = "consul"
	Database = "database"
)

func (e *explainer) noScheduler() {
	missed := map[string]*waitv1.Unanswered{}
	for _, u := range e.Unanswered {
		missed[u.GetName()] = u
	}
	scheduler, why := missed["scheduler"], "no answer"
	switch {
	case missed[Database] != nil: // a service without its database also fails its health check
		e.because(Database, wait.NoAnswer, nil, "the scheduler can't answer without its database: "+missed[Database].GetError(),
			orElse(missed[Database].GetFix(), "check that PostgreSQL runs and can be reached (`rollout doctor`); runs continue by themselves"))
		return
	case missed[Registry] != nil:
		e.because(Registry, wait.NoAnswer, nil, "the scheduler, which knows the run, can't be looked up: "+missed[Registry].GetError(),
			"check that the Consul agent, or the process with `--target registry`, runs; with `--server` the command asks a service directly")
		return
	case scheduler != nil && e.Processes["scheduler"].PID != 0:
		e.away(scheduler, nil)
		return
	case scheduler != nil:
		why = scheduler.GetError()
	}
	e.because("scheduler", wait.NoAnswer, nil, "the scheduler, which knows the run, does not answer: "+why,
		"see which services run with `rollout status`; start the scheduler again, and it continues the run or records it as interrupted")
}

// resume is the command that continues the run.
func (e *explainer) resume() string { return "`rollout run --resume " + e.run.GetRunId() + "`" }

func (e *explainer) interrupted() {
	evidence := "the run was interrupted at step " + steps(e.run)
	if e.run.GetMessage() != "" {
		evidence += ": " + e.run.GetMessage()
	}
	e.because("user", "INTERRUPTED", e.run.GetEndTime(), evidence, e.resume()+" continues it")
	if e.Dead {
		e.because("user", "NO_CONTROL_PLANE", lastTime(e.Events), "no control plane runs on this state folder: it stopped or was killed"+e.lastSign(), e.resume()+" starts one and continues the run")
	}
	e.lastFailure()
}

// lastSign is when the run was last heard of.
func (e *explainer) lastSign() string {
	if t := lastTime(e.Events); t != nil {
		return "; the last event of the run is " + Elapsed(e.Time.Sub(t.AsTime())) + " old"
	}
	return ""
}

func lastTime(events []*eventv1.Event) *timestamppb.Timestamp {
	if len(events) == 0 {
		return nil
	}
	return events[len(events)-1].GetTime()
}

// cancelled says when a run was cancelled. The message of such a run may say it, too.
func cancelled(r *runv1.Run) string {
	message := strings.TrimPrefix(r.GetMessage(), "cancelled by request")
	message = strings.TrimSuffix(message, fmt.Sprintf(" after step %d", r.GetStep()))
	return "the run was cancelled by request at step " + strings.TrimSuffix(steps(r)+": "+strings.TrimSpace(message), ": ")
}

func (e *explainer) ended() {
	switch e.run.GetState() {
	case runv1.RunState_RUN_STATE_SUCCEEDED:
		if e.run.GetReason() == refusal.StoppedByGate {
			e.because("user", e.run.GetReason(), e.run.GetEndTime(), "the run was stopped after step "+steps(e.run)+" by "+e.run.GetMessage(), "")
			return
		}
		e.because("user", "SUCCEEDED", e.run.GetEndTime(), "the run has committed all of its "+steps(e.run)+" steps", "")
	case runv1.RunState_RUN_STATE_CANCELLED:
		e.because("user", orElse(e.run.GetReason(), "CANCELLED"), e.run.GetEndTime(),
			cancelled(e.run), e.resume()+" continues it")
	default:
		e.because("user", orElse(e.run.GetReason(), "FAILED"), e.run.GetEndTime(), "the run failed at step "+steps(e.run)+": "+e.run.GetMessage(),
			orElse(strings.ReplaceAll(fixes[e.run.GetReason()], " RUN", " "+e.run.GetRunId()), "correct the cause, then "+e.resume()))
		if e.run.GetReason() == "EVERY_GROUP_EXCLUDED" {
			e.exclusion()
			return
		}
		e.lastFailure()
	}
}

// exclusion adds why the last group was excluded: the reason, and what a worker reported of it.
func (e *explainer) exclusion() {
	var excluded *eventv1.Event
	for _, event := range slices.Backward(e.Failures) {
		switch {
		case excluded == nil && event.GetKind() == "group.excluded":
			excluded = event
			e.because("user", orElse(event.GetAttributes()["last_reason"], "GROUP_EXCLUDED"), event.GetTime(), event.GetMessage(),
				"see why with `rollout logs tail "+e.run.GetRunId()+" --level warn`; correct the cause, then "+e.resume())
		case excluded != nil && event.GetKind() == "log" && strings.HasPrefix(event.GetService(), "inference-worker"):
			e.because(event.GetService(), excluded.GetAttributes()["last_reason"], event.GetTime(), event.GetMessage(), "")
			return
		}
	}
}

// lastFailure adds the last error before the end, which the message of the run may not have.
func (e *explainer) lastFailure() {
	for _, event := range slices.Backward(e.Failures) {
		if event.GetLevel() != eventv1.Level_LEVEL_ERROR || event.GetKind() == "run.state" || event.GetKind() == "phase" {
			continue
		}
		if strings.Contains(e.run.GetMessage(), event.GetMessage()) {
			return
		}
		evidence := event.GetMessage()
		if lines := event.GetAttributes()["last_lines"]; lines != "" {
			evidence += "; its last lines:\n" + lines
		}
		e.because(event.GetService(), "LAST_ERROR", event.GetTime(), evidence, "")
		return
	}
}

// fixes of failures whose message does not have one.
var fixes = map[string]string{
	"WORKER_CRASH_LOOP":     "correct what the last lines report, then resume the run; see all of the output with `rollout logs worker RUN WORKER`",
	"PLAN_INPUTS_CHANGED":   "restore the inputs of the plan, or make a new plan with `rollout plan`",
	"WEIGHTS_SOURCES_LOST":  "resume the run: it continues from its newest snapshot",
	"ATTEMPTS_EXHAUSTED":    "see why samples fail with `rollout logs tail RUN --kind group.excluded`, or raise `limits.group_attempts`",
	"PROMPTS_EXHAUSTED":     "add rows, raise `data.epochs`, or lower `train.steps`",
	"REWARD_FILE_CHANGED":   "restore the file, or make a new plan with `rollout plan`",
	"NON_FINITE_GRADIENT":   "lower `train.learning_rate`, and start from an earlier snapshot",
	"EXPLODING_GRADIENT":    "lower `train.learning_rate` or `train.max_grad_norm`, and start from an earlier snapshot",
	"BLOB_DENIED":           "correct the credentials of the bucket where rolloutd has them (blob.access_key with blob.secret_key, or blob.credentials), start rolloutd again, and continue with `rollout run --resume RUN`",
	"LEDGER_CONFIG_CHANGED": "resume the run with the plan that it was started with",
}
