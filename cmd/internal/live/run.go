// Package live follows a run and shows it: as a view that redraws itself on a terminal, as lines elsewhere, and as a summary
// when it ends. Everything comes from two streams, the run's status and its events.
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
	paceWindow   = 20 // steps that the pace is taken over
)

// Run is all that is shown of one run. It is not safe for concurrent use.
type Run struct {
	Status    *runv1.RunStatus
	Reward    []float64 // mean reward, or loss where nothing is rewarded, of each committed step
	Evals     []Eval
	Step      map[string]float64 // metrics of the last step
	Warnings  []*Warning         // the newest
	Snapshot  *eventv1.Event     // the newest
	LeftOut   map[string]string  // groups that no attempt completed -> why the last failed
	committed []time.Time        // times of the last steps, without a pause between them
	lastStep  uint64
	repeats   Repeats
	now       func() time.Time // nil: time.Now
}

// Eval is one evaluation on held-out rows.
type Eval struct {
	Step    uint64
	Metrics map[string]float64
	Samples []Answer
}

// Answer is one sample of an evaluation.
type Answer struct {
	Row        uint64   `json:"row"`
	Prompt     string   `json:"prompt"`
	Completion string   `json:"completion"`
	Reward     *float64 `json:"reward"` // nil: nobody scored it
	Failed     string   `json:"failed"` // why not, e.g. REWARD_RAISED
}

// Verdict is the reward as text, or that there is none.
func (a Answer) Verdict() string {
	if a.Reward == nil {
		return strings.ToLower(strings.TrimSpace("not scored " + a.Failed))
	}
	return output.Number(*a.Reward)
}

// Good reports whether it earned more than half a reward.
func (a Answer) Good() bool { return a.Reward != nil && *a.Reward > 0.5 }

// Question is the end of the prompt that a person looks for: of a rendered chat the last line that somebody wrote.
func (a Answer) Question() string {
	lines := strings.Split(strings.TrimSpace(a.Prompt), "\n")
	for i := len(lines) - 1; i > 0; i-- {
		if line := strings.TrimSpace(lines[i]); line != "" && line != "assistant" {
			return line
		}
	}
	return a.Prompt
}

// Update takes a status.
func (r *Run) Update(status *runv1.RunStatus) { r.Status = status }

// Add takes an event.
func (r *Run) Add(e *eventv1.Event) {
	if e.GetLevel() >= eventv1.Level_LEVEL_WARN {
		w := r.repeats.Add(e)
		r.Warnings = append(slices.DeleteFunc(r.Warnings, func(other *Warning) bool { return other == w }), w)
		r.Warnings = r.Warnings[max(0, len(r.Warnings)-warningsKept):]
	}
	switch e.GetKind() {
	case "run.state":
		switch e.GetAttributes()["state"] {
		case "STARTING", "PAUSED": // the time until the next step says nothing of the pace
			r.committed = nil
		}
	case "step.committed":
		if e.GetStep() <= r.lastStep {
			return // a recovery commits what was committed
		}
		r.lastStep, r.Step = e.GetStep(), e.GetMetrics()
		if value, ok := headline(e.GetMetrics()); ok {
			r.Reward = append(r.Reward, value)
		}
		r.committed = append(r.committed, e.GetTime().AsTime())
		r.committed = r.committed[max(0, len(r.committed)-paceWindow):]
	case "group.excluded":
		if r.LeftOut == nil {
			r.LeftOut = map[string]string{}
		}
		r.LeftOut[e.GetAttributes()["group"]] = cmp.Or(e.GetAttributes()["last_reason"], e.GetAttributes()["reason"])
	case "eval.finished":
		r.addEval(e)
	case "snapshot.created":
		r.Snapshot = e
	}
}

func (r *Run) addEval(e *eventv1.Event) {
	eval := Eval{Step: e.GetStep(), Metrics: e.GetMetrics()}
	_ = json.Unmarshal([]byte(e.GetAttributes()["samples"]), &eval.Samples) // without samples there are none to show
	if n := len(r.Evals); n > 0 && r.Evals[n-1].Step == eval.Step {
		r.Evals[n-1] = eval
		return
	}
	r.Evals = append(r.Evals, eval)
}

// headline is the number that a run is about.
func headline(metrics map[string]float64) (float64, bool) {
	for _, name := range []string{"reward/mean", "loss"} {
		if value, ok := metrics[name]; ok && !math.IsNaN(value) {
			return value, true
		}
	}
	return 0, false
}

// Supervised reports whether nothing is rewarded: the curve is the loss.
func (r *Run) Supervised() bool {
	return algorithm.FromData(r.Status.GetRun().GetPlan().GetConfig())
}

// EvalNames are the numbers that evaluations are about, of which the first that there is counts: of answers that were scored, then of
// rows whose loss was computed.
var EvalNames = []string{"eval/accuracy", "eval/reward", "eval/rewards/accuracy", "eval/loss"}

// Accuracy is the number that evaluations are about, of each of them, and its name.
func (r *Run) Accuracy() (values []float64, name string) {
	for _, name = range EvalNames {
		for _, eval := range r.Evals {
			if value, ok := eval.Metrics[name]; ok {
				values = append(values, value)
			}
		}
		if len(values) > 0 {
			return values, strings.TrimPrefix(name, "eval/")
		}
	}
	return nil, "reward"
}

// Remaining is how long the steps that are left will take at the pace of the last ones since the run was started or resumed;
// false where that is not known or the run does not go on.
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

// CommittedSteps is the number of steps made, by whichever stream knows more.
func (r *Run) CommittedSteps() uint64 { return max(r.Status.GetRun().GetStep(), r.lastStep) }

// Speed is samples and tokens a second: those of the last step, else what the inference workers say now.
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

// Over reports whether a run does nothing more by itself: it has ended, or waits for somebody after a refused gradient.
func Over(run *runv1.Run) bool { return Ended(run.GetState()) || refusal.Paused(run) }

// MarkInterrupted sets the state of a run that a dead control plane left active to INTERRUPTED.
func MarkInterrupted(run *runv1.Run) {
	if !Over(run) {
		run.State = runv1.RunState_RUN_STATE_INTERRUPTED
		run.Message = "the control plane died; `rollout run --resume " + run.GetRunId() + "` goes on"
	}
}

// State is the short name of a state: "RUNNING".
func State(state runv1.RunState) string {
	return strings.TrimPrefix(state.String(), "RUN_STATE_")
}
