// Package health decides from the metrics of a run's steps whether the run has collapsed: its
// policy, its rewards, or its gradients. docs/health.md defines each check.
//
// A Monitor reads no clock, no file, and no random number, and its state can be stored. The same
// steps give the same findings, also if the process that watches the run is replaced in between.
package health

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/rollout-rl/rollout/libs/algorithm"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Finding is a collapse.
type Finding struct {
	Reason   string  // machine-readable, such as ENTROPY_COLLAPSE (libs/refusal)
	Step     uint64  // at which it was found
	Since    uint64  // first step of the collapse
	Metric   string  // name of the metric that shows it
	Value    float64 // of the metric at the step
	Limit    float64 // which the value crossed
	Repeated bool    // whether the same collapse was found before
	What     string  // the observation
	Cause    string  // the likely cause
	Fix      string
}

// Message is the finding for people.
func (f Finding) Message() string { return f.What + ". Likely cause: " + f.Cause + ". Fix: " + f.Fix }

// Monitor watches one run. One goroutine at a time uses it.
type Monitor struct {
	cfg     *configv1.HealthConfig
	run     *configv1.RunConfig
	sampled bool // the policy samples, and a reward scores it
	state   state
}

// state is what a Monitor remembers of the steps so far.
type state struct {
	Step    uint64             `json:"step"`              // last step that was observed
	First   map[string]float64 `json:"first,omitempty"`   // first value of metrics
	Early   []reward           `json:"early,omitempty"`   // of the first window
	Recent  []reward           `json:"recent,omitempty"`  // of the newest window
	Best    *reward            `json:"best,omitempty"`    // the best mean over a window
	Norms   []float64          `json:"norms,omitempty"`   // gradient norms of the newest window
	Streaks map[string]*streak `json:"streaks,omitempty"` // by reason
	// Halted is the finding that stopped the incarnation Incarnation of the run.
	Halted      *Finding `json:"halted,omitempty"`
	Incarnation uint32   `json:"incarnation,omitempty"`
}

// reward is the mean reward of a step, and its standard error.
type reward struct {
	Mean  float64 `json:"mean"`
	Error float64 `json:"error"`
}

// streak is a row of consecutive steps that cross a threshold.
type streak struct {
	Since uint64 `json:"since"`
	Steps uint64 `json:"steps"`
	Next  uint64 `json:"next"` // number of steps of the next finding
}

// New returns the monitor of a run with the stored state, or without one if the state is empty.
func New(run *configv1.RunConfig, stored []byte) (*Monitor, error) {
	m := &Monitor{cfg: run.GetHealth(), run: run, sampled: algorithm.Traits(run).GetNeedsReward()}
	if len(stored) == 0 {
		return m, nil
	}
	if err := json.Unmarshal(stored, &m.state); err != nil {
		m.state = state{}
		return m, fmt.Errorf("read the state of the health check: %w", err)
	}
	return m, nil
}

// State is the state to store.
func (m *Monitor) State() []byte {
	text, err := json.Marshal(m.state)
	if err != nil { // it has finite numbers only
		return nil
	}
	return text
}

// Step is the last step that was observed.
func (m *Monitor) Step() uint64 { return m.state.Step }

// Halt records that a finding stops an incarnation of the run.
func (m *Monitor) Halt(f Finding, incarnation uint32) {
	if !finite(f.Value) { // JSON has no such number
		f.Value = 0
	}
	m.state.Halted, m.state.Incarnation = &f, incarnation
}

// Halted returns the finding that stopped an incarnation of the run; nil without one. The next
// incarnation continues.
func (m *Monitor) Halted(incarnation uint32) *Finding {
	if m.state.Incarnation != incarnation {
		return nil
	}
	return m.state.Halted
}

// Observe compares the metrics of a step with the thresholds. A step that was observed before,
// which a recovery makes again, gives no findings.
func (m *Monitor) Observe(step uint64, metrics map[string]float64) []Finding {
	if m.cfg == nil || step <= m.state.Step {
		return nil
	}
	m.state.Step = step
	m.remember(metrics)
	var findings []Finding
	for _, c := range checks {
		f, broken := c.broken(m, metrics)
		length := uint64(1)
		if !c.atOnce {
			length = uint64(max(1, m.cfg.GetSteps()))
		}
		s := m.extend(c.reason, step, broken, length)
		if s == nil {
			continue
		}
		f.Reason, f.Step, f.Since, f.Repeated = c.reason, step, s.Since, s.Steps > length
		if length > 1 {
			f.What += fmt.Sprintf(", in each of the last %d steps", s.Steps)
		}
		findings = append(findings, f)
	}
	m.record(metrics)
	return findings
}

// extend counts a step that crosses the threshold of a check, and returns the streak if a finding
// is due: after length steps, then after ten times as many.
func (m *Monitor) extend(reason string, step uint64, broken bool, length uint64) *streak {
	if !broken {
		delete(m.state.Streaks, reason)
		return nil
	}
	s := m.state.Streaks[reason]
	if s == nil {
		s = &streak{Since: step, Next: length}
		if m.state.Streaks == nil {
			m.state.Streaks = map[string]*streak{}
		}
		m.state.Streaks[reason] = s
	}
	if s.Steps++; s.Steps != s.Next {
		return nil
	}
	s.Next *= 10
	return s
}

// remember stores the first values of metrics.
func (m *Monitor) remember(metrics map[string]float64) {
	for _, name := range []string{entropy, loss} {
		value, ok := metrics[name]
		if _, known := m.state.First[name]; !ok || known || !finite(value) {
			continue
		}
		if m.state.First == nil {
			m.state.First = map[string]float64{}
		}
		m.state.First[name] = value
	}
}

// record adds the rewards and the gradient norm of a step to the windows, after it was judged.
func (m *Monitor) record(metrics map[string]float64) {
	window := int(max(2, m.cfg.GetWindow()))
	if r, ok := m.rewardOf(metrics); ok {
		if len(m.state.Early) < window {
			m.state.Early = append(m.state.Early, r)
		}
		m.state.Recent = newest(append(m.state.Recent, r), window)
		if mean := meanOf(m.state.Recent); m.state.Best == nil || mean.Mean > m.state.Best.Mean {
			m.state.Best = &mean
		}
	}
	if norm, ok := metrics[gradNorm]; ok && finite(norm) && norm > 0 {
		m.state.Norms = newest(append(m.state.Norms, norm), window)
	}
}

// rewardOf is the mean reward of a step with its standard error.
func (m *Monitor) rewardOf(metrics map[string]float64) (r reward, ok bool) {
	mean, ok := metrics["reward/sampled"] // with dynamic sampling, over all groups; the batch lacks those of equal rewards
	if !ok {
		mean, ok = metrics[rewardMean]
	}
	if !ok || !m.sampled || !finite(mean) {
		return reward{}, false
	}
	if deviation, samples := metrics[rewardDeviation], metrics["samples"]; finite(deviation) && samples > 0 {
		r.Error = deviation / math.Sqrt(samples)
	}
	r.Mean = mean
	return r, true
}

// improved reports whether the mean reward of the newest steps is above that of the first ones by
// more than two standard errors of these means.
func (m *Monitor) improved() bool {
	size := min(len(m.state.Early), (len(m.state.Recent)+1)/2)
	if size == 0 {
		return false
	}
	before, now := meanOf(m.state.Early[:size]), meanOf(newest(m.state.Recent, size))
	return now.Mean-before.Mean > 2*max(before.Error, now.Error)/math.Sqrt(float64(size))
}

// meanOf averages means and standard errors.
func meanOf(list []reward) (mean reward) {
	for _, r := range list {
		mean.Mean += r.Mean / float64(len(list))
		mean.Error += r.Error / float64(len(list))
	}
	return mean
}

func newest[T any](list []T, n int) []T {
	if len(list) <= n {
		return list
	}
	return slices.Clone(list[len(list)-n:])
}

// median of a list that is not empty.
func median(list []float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
