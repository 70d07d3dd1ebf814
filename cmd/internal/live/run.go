// Package live follows a run and shows it: as a view that is redrawn on a terminal, else as lines,
// and as a summary at the end. Its sources are two streams: the status of the run and its events.
package live

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/refusal"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

const (
	warningsKept = 3
	paceWindow   = 20 // steps for the estimate of the remaining time
)

// evalFinished is the kind of the event of an evaluation.
const evalFinished = "eval.finished"

// Run holds what is shown of a run. It is not safe for concurrent use.
type Run struct {
	Status    *runv1.RunStatus
	Reward    []float64 // mean reward of each committed step; without a reward, the loss
	Evals     []Eval
	Step      map[string]float64 // metrics of the last step
	Warnings  []*Warning         // the newest
	Snapshot  *eventv1.Event     // the newest
	Lineage   string             // newest lineage of the weights; "": no weights were lost
	Excluded  map[string]string  // groups that no attempt completed, with the reason of the last failure
	committed []time.Time        // times of the last steps since the last pause
	lastStep  uint64
	repeats   Repeats
	now       func() time.Time // nil: time.Now
}

// Eval is one evaluation on held-out rows.
type Eval struct {
	Step    uint64
	Metrics map[string]float64
	Samples []Answer // of the first and the last evaluation
}

// Answer is one sample of an evaluation.
type Answer struct {
	Row        uint64   `json:"row"`
	Prompt     string   `json:"prompt"`
	Completion string   `json:"completion"`
	Reward     *float64 `json:"reward"` // nil: it was not scored
	Failed     string   `json:"failed"` // reason, for example REWARD_RAISED
}

// Verdict returns the reward as text, or why it is missing.
func (a Answer) Verdict() string {
	if a.Reward == nil {
		return strings.ToLower(strings.TrimSpace("not scored " + a.Failed))
	}
	return output.Number(*a.Reward)
}

// Good reports whether the reward is above 0.5.
func (a Answer) Good() bool { return a.Reward != nil && *a.Reward > 0.5 }

// Question returns the prompt; of a rendered chat, the last line that is not a role.
func (a Answer) Question() string {
	lines := strings.Split(strings.TrimSpace(a.Prompt), "\n")
	for i := len(lines) - 1; i > 0; i-- {
		if line := strings.TrimSpace(lines[i]); line != "" && line != "assistant" {
			return line
		}
	}
	return a.Prompt
}

// Update sets the status.
func (r *Run) Update(status *runv1.RunStatus) { r.Status = status }

// Add adds an event.
func (r *Run) Add(e *eventv1.Event) {
	if e.GetLevel() >= eventv1.Level_LEVEL_WARN {
		w := r.repeats.Add(e)
		r.Warnings = append(slices.DeleteFunc(r.Warnings, func(other *Warning) bool { return other == w }), w)
		r.Warnings = r.Warnings[max(0, len(r.Warnings)-warningsKept):]
	}
	switch e.GetKind() {
	case "run.state":
		switch e.GetAttributes()["state"] {
		case "STARTING", "PAUSED": // the next step takes longer
			r.committed = nil
		}
	case "step.committed":
		if e.GetStep() <= r.lastStep {
			return // a recovery commits steps again
		}
		r.lastStep, r.Step = e.GetStep(), e.GetMetrics()
		if value, ok := headline(e.GetMetrics()); ok {
			r.Reward = append(r.Reward, value)
		}
		r.committed = append(r.committed, e.GetTime().AsTime())
		r.committed = r.committed[max(0, len(r.committed)-paceWindow):]
	case "group.excluded":
		if r.Excluded == nil {
			r.Excluded = map[string]string{}
		}
		r.Excluded[e.GetAttributes()["group"]] = cmp.Or(e.GetAttributes()["last_reason"], e.GetAttributes()["reason"])
	case evalFinished:
		r.addEval(e)
	case "snapshot.created":
		r.Snapshot = e
	case "lineage.forked":
		r.Lineage = e.GetAttributes()["lineage"]
	}
}

func (r *Run) addEval(e *eventv1.Event) {
	eval := Eval{Step: e.GetStep(), Metrics: e.GetMetrics()}
	_ = json.Unmarshal([]byte(e.GetAttributes()["samples"]), &eval.Samples) // an evaluation may have no samples
	if n := len(r.Evals); n > 0 && r.Evals[n-1].Step == eval.Step {
		r.Evals[n-1] = eval
		return
	}
	if n := len(r.Evals); n > 1 {
		r.Evals[n-1].Samples = nil // only those of the first and the last evaluation are shown
	}
	r.Evals = append(r.Evals, eval)
}

// headline returns the main metric of a step: the reward, else the loss.
func headline(metrics map[string]float64) (float64, bool) {
	for _, name := range []string{"reward/mean", "loss"} {
		if value, ok := metrics[name]; ok && !math.IsNaN(value) {
			return value, true
		}
	}
	return 0, false
}

// Supervised reports whether the run has no reward, so that its curve is the loss.
func (r *Run) Supervised() bool {
	return algorithm.FromData(r.Status.GetRun().GetPlan().GetConfig())
}

// EvalNames are the main metrics of evaluations, in order of preference.
var EvalNames = []string{"eval/accuracy", "eval/reward", "eval/rewards/accuracy", "eval/loss"}

// Accuracy returns the main metric of each evaluation that has it, its name, and the step of the
// last one.
func (r *Run) Accuracy() (values []float64, name string, step uint64) {
	names := EvalNames
	if len(r.Evals) > 0 {
		names = append(slices.Clone(names), evalNames(r.Evals[len(r.Evals)-1].Metrics)...) // those of suites
	}
	for _, name = range names {
		for _, eval := range r.Evals {
			if value, ok := eval.Metrics[name]; ok {
				values, step = append(values, value), eval.Step
			}
		}
		if len(values) > 0 {
			return values, strings.TrimPrefix(name, "eval/"), step
		}
	}
	return nil, "reward", 0
}

// Remaining estimates the remaining time from the last steps since the run was started or resumed;
// false if that is not possible or the run is not active.
func (r *Run) Remaining() (time.Duration, bool) {
	if r.Status.GetRun().GetState() != runv1.RunState_RUN_STATE_RUNNING {
		return 0, false
	}
	left := float64(r.Status.GetRun().GetTotalSteps()) - float64(r.CommittedSteps())
	n := len(r.committed)
	if left <= 0 || n < 2 {
		return 0, false
	}
	pace := r.committed[n-1].Sub(r.committed[0]).Seconds() / float64(n-1)
	return time.Duration(pace * left * float64(time.Second)), true
}

// CommittedSteps returns the number of committed steps, from the stream that is ahead.
func (r *Run) CommittedSteps() uint64 { return max(r.Status.GetRun().GetStep(), r.lastStep) }

// Speed returns samples and tokens per second: of the last step, else the current ones of the
// workers.
func (r *Run) Speed() (samples, tokens float64) {
	samples, tokens = r.Step["samples_per_second"], r.Step["tokens_per_second"]
	if samples > 0 || tokens > 0 {
		return samples, tokens
	}
	for _, worker := range r.Status.GetWorkers() {
		samples += worker.GetSamplesPerSecond()
		tokens += worker.GetTokensPerSecond()
	}
	return samples, tokens
}

// Ended reports whether a state is final.
func Ended(state runv1.RunState) bool {
	switch state {
	case runv1.RunState_RUN_STATE_SUCCEEDED, runv1.RunState_RUN_STATE_FAILED,
		runv1.RunState_RUN_STATE_CANCELLED, runv1.RunState_RUN_STATE_INTERRUPTED:
		return true
	}
	return false
}

// Over reports whether a run has ended, or is paused by a rejected gradient or the health check
// until a user acts.
func Over(run *runv1.Run) bool { return Ended(run.GetState()) || refusal.Paused(run) }

// MarkInterrupted sets the state of a run that a dead control plane left active to INTERRUPTED.
func MarkInterrupted(run *runv1.Run) {
	if !Over(run) {
		run.State = runv1.RunState_RUN_STATE_INTERRUPTED
		run.Message = "the control plane stopped unexpectedly; continue with `rollout run --resume " + run.GetRunId() + "`"
	}
}

// State returns the short name of a state: "RUNNING".
func State(state runv1.RunState) string {
	return strings.TrimPrefix(state.String(), "RUN_STATE_")
}
