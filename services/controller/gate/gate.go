// Package gate decides from the metrics of a run which of its gates fire (`[gates.*]`), and which
// values of `snapshot.best` are new best ones. docs/evaluation.md describes them.
//
// A Monitor reads no clock, no file, and no random number, and its state can be stored. The same
// metrics fire the same gates at the same steps, also if the process that watches the run is
// replaced in between.
package gate

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/rollout-rl/rollout/libs/condition"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Actions of gates.
const (
	Stop    = "stop"
	Pause   = "pause"
	Promote = "promote"

	// RestoreBest continues from the newest snapshot of a best value.
	RestoreBest = "restore_best"
)

// Best is the name of the snapshots of best values.
const Best = "best"

// Fired is a gate that fired.
type Fired struct {
	Gate      string  `json:"gate"`
	Action    string  `json:"action"`
	Condition string  `json:"condition"`
	Metric    string  `json:"metric"`
	Value     float64 `json:"value"`
	Step      uint64  `json:"step"`
	Best      float64 `json:"best,omitempty"`      // with `no improvement`: the best value
	BestStep  uint64  `json:"best_step,omitempty"` // and its step
	Window    uint64  `json:"window,omitempty"`    // and how many values did not improve on it
	Ended     bool    `json:"ended,omitempty"`     // whether the scheduler knows that a stop or a pause ended the run

	Restore *Restore `json:"restore,omitempty"` // with restore_best: what is restored; nil: it is not decided yet
}

// Restore is what a gate with the action restore_best restores. It is stored before the learner
// loads anything.
type Restore struct {
	Step     uint64 `json:"step"`           // after which the weights are restored
	Snapshot string `json:"snapshot"`       // id; empty: nothing is restored
	From     uint64 `json:"from"`           // step of the snapshot
	Digest   string `json:"digest"`         // of its weights
	Why      string `json:"why,omitempty"`  // why nothing is restored
	Done     bool   `json:"done,omitempty"` // whether workers have the restored weights
}

// Evidence is what fired the gate, for people.
func (f Fired) Evidence() string {
	text := fmt.Sprintf("`%s` holds at step %d: %s is %.6g", f.Condition, f.Step, f.Metric, f.Value)
	if f.Window > 0 {
		text += fmt.Sprintf(", and the best was %.6g at step %d", f.Best, f.BestStep)
	}
	return text
}

// Observation is what a Monitor made of metrics.
type Observation struct {
	New     bool     // whether they were observed for the first time
	Fired   []Fired  // gates that fire, by name
	Missing []string // gates whose metric has been missing for a while, by name
}

// Monitor watches the gates of one run. One goroutine at a time uses it.
type Monitor struct {
	gates []gate
	best  string // metric; empty: none
	state state
}

type gate struct {
	name, action string
	condition    condition.Condition
}

// state is what a Monitor remembers.
type state struct {
	Step      uint64             `json:"step"`                // last step whose metrics were observed
	Evaluated *uint64            `json:"evaluated,omitempty"` // last step whose evaluation was observed
	Fired     map[string]*Fired  `json:"fired,omitempty"`     // by gate
	Missing   map[string]uint64  `json:"missing,omitempty"`   // how often in a row the metric of a gate was missing
	Streaks   map[string]*streak `json:"streaks,omitempty"`   // by gate
	Best      *record            `json:"best,omitempty"`      // of snapshot.best
}

// record is the best value of a metric.
type record struct {
	Value float64 `json:"value"`
	Step  uint64  `json:"step"`
	Taken bool    `json:"taken,omitempty"` // whether it is a value of trained weights, which get a snapshot
}

// streak counts values in a row that do not improve on the best.
type streak struct {
	record
	Values uint64 `json:"values"`
}

// New returns the monitor of a run with the stored state, or without one if the state is empty. The
// monitor is usable if there is an error.
func New(run *configv1.RunConfig, stored []byte) (*Monitor, error) {
	m := &Monitor{best: run.GetSnapshot().GetBest()}
	for _, name := range slices.Sorted(maps.Keys(run.GetGates())) {
		c, err := condition.Parse(run.GetGates()[name].GetWhen())
		if err != nil {
			return m, fmt.Errorf("gate %s: %w", name, err) // the planner refuses it
		}
		m.gates = append(m.gates, gate{name: name, action: run.GetGates()[name].GetAction(), condition: c})
	}
	if len(stored) == 0 {
		return m, nil
	}
	if err := json.Unmarshal(stored, &m.state); err != nil {
		m.state = state{}
		return m, fmt.Errorf("read the state of the gates: %w", err)
	}
	return m, nil
}

// Idle reports whether there is nothing to watch.
func (m *Monitor) Idle() bool { return len(m.gates) == 0 && m.best == "" }

// State is the state to store; empty if there is nothing to watch.
func (m *Monitor) State() []byte {
	if m.Idle() {
		return nil
	}
	text, err := json.Marshal(m.state)
	if err != nil { // it has finite numbers only
		return nil
	}
	return text
}

// Step is the last step whose metrics were observed.
func (m *Monitor) Step() uint64 { return m.state.Step }

// ObserveStep judges the metrics of a committed step.
func (m *Monitor) ObserveStep(step uint64, metrics map[string]float64) Observation {
	if m.Idle() || step <= m.state.Step {
		return Observation{}
	}
	m.state.Step = step
	return m.observe(step, metrics, false, true)
}

// ObserveEvaluation judges the result of an evaluation. That of the weights which the run starts
// from is what others are compared with, and fires nothing.
func (m *Monitor) ObserveEvaluation(step uint64, metrics map[string]float64, first bool) Observation {
	if m.Idle() || m.state.Evaluated != nil && step <= *m.state.Evaluated {
		return Observation{}
	}
	m.state.Evaluated = &step
	return m.observe(step, metrics, true, !first)
}

// observe judges metrics of steps or of evaluations.
func (m *Monitor) observe(step uint64, metrics map[string]float64, evaluated, fires bool) Observation {
	out := Observation{New: true}
	for _, g := range m.gates {
		if condition.Evaluated(g.condition.Metric) != evaluated || m.state.Fired[g.name] != nil {
			continue
		}
		value, ok := metrics[g.condition.Metric]
		if !ok || math.IsNaN(value) || math.IsInf(value, 0) {
			set(&m.state.Missing, g.name, m.state.Missing[g.name]+1)
			if m.state.Missing[g.name] == missingAfter(evaluated) {
				out.Missing = append(out.Missing, g.name)
			}
			continue
		}
		delete(m.state.Missing, g.name)
		f := Fired{Gate: g.name, Action: g.action, Condition: g.condition.String(), Metric: g.condition.Metric, Value: value, Step: step}
		if !m.holds(g, value, &f) || !fires {
			continue
		}
		set(&m.state.Fired, g.name, &f)
		out.Fired = append(out.Fired, f)
	}
	if value, ok := metrics[m.best]; ok && condition.Evaluated(m.best) == evaluated && !math.IsNaN(value) && !math.IsInf(value, 0) {
		if best := m.state.Best; best == nil || condition.Better(m.best, value, best.Value, 0) {
			m.state.Best = &record{Value: value, Step: step, Taken: fires}
		}
	}
	return out
}

// missingAfter is how many values of a metric in a row must be missing to be reported: a step may
// lack a metric, such as the entropy of a step without gradient.
func missingAfter(evaluated bool) uint64 {
	if evaluated {
		return 2
	}
	return 10
}

// holds reports whether the condition of a gate holds for a value.
func (m *Monitor) holds(g gate, value float64, f *Fired) bool {
	if g.condition.Operator != "" {
		return g.condition.Holds(value)
	}
	s := m.state.Streaks[g.name]
	if s == nil || condition.Better(g.condition.Metric, value, s.Value, g.condition.By) {
		set(&m.state.Streaks, g.name, &streak{record: record{Value: value, Step: f.Step}})
		return false
	}
	s.Values++
	f.Best, f.BestStep, f.Window = s.Value, s.Step, g.condition.Window
	return s.Values >= g.condition.Window
}

func set[V any](m *map[string]V, name string, value V) {
	if *m == nil {
		*m = map[string]V{}
	}
	(*m)[name] = value
}

// Halted returns the gate that ends the run: the first that fired, by step and then by name; nil
// without one, or if the scheduler knows the end. A run that is resumed afterwards continues.
func (m *Monitor) Halted() *Fired {
	var first *Fired
	for _, f := range m.FiredSince(0) {
		if (f.Action == Stop || f.Action == Pause) && !f.Ended && (first == nil || f.Step < first.Step) {
			first = &f
		}
	}
	return first
}

// End records that the scheduler knows the end of the run.
func (m *Monitor) End() {
	for _, f := range m.state.Fired {
		f.Ended = true
	}
}

// Restoring returns the gates whose best snapshot is not restored yet, by name.
func (m *Monitor) Restoring() (list []Fired) {
	for _, f := range m.FiredSince(0) {
		if f.Action == RestoreBest && (f.Restore == nil || !f.Restore.Done) {
			list = append(list, f)
		}
	}
	return list
}

// SetRestore records what all gates of Restoring restore.
func (m *Monitor) SetRestore(r Restore) {
	for _, f := range m.Restoring() {
		m.state.Fired[f.Gate].Restore = &r
	}
}

// Restored returns what replaces the weights of a step; nil: nothing does.
func (m *Monitor) Restored(step uint64) *Restore {
	for _, f := range m.state.Fired {
		if r := f.Restore; r != nil && r.Step == step && r.Snapshot != "" {
			return r
		}
	}
	return nil
}

// FiredSince returns the gates that fired at a step or later, by name.
func (m *Monitor) FiredSince(step uint64) (list []Fired) {
	for _, name := range slices.Sorted(maps.Keys(m.state.Fired)) {
		if f := m.state.Fired[name]; f.Step >= step {
			list = append(list, *f)
		}
	}
	return list
}

// Snapshots returns the names of the snapshots of a step that gates promote, and that of a best
// value.
func (m *Monitor) Snapshots(step uint64) (names []string) {
	for _, f := range m.FiredSince(step) {
		if f.Step == step && f.Action == Promote {
			names = append(names, "gate-"+f.Gate)
		}
	}
	if b := m.state.Best; b != nil && b.Step == step && b.Taken {
		names = append(names, Best)
	}
	return names
}

// Condition is the condition of a gate.
func (m *Monitor) Condition(name string) condition.Condition {
	for _, g := range m.gates {
		if g.name == name {
			return g.condition
		}
	}
	return condition.Condition{}
}
