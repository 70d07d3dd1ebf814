package scheduler

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler/dataset"
)

// view is all that is known of a run now: what its parts saw last. Messages in it are never changed, only replaced.
type view struct {
	run      *Run
	ledger   *bufferv1.LedgerState
	position uint64
	first    uint64
	rows     uint64
	progress *learnerv1.Progress
	workers  map[string]workerView
	waits    map[string]string // what is waited for -> why it takes long

	waiting string    // what waitingFor said last
	since   time.Time // since when
}

// workerView is one worker as supervisor, registry and the worker itself describe it.
type workerView struct {
	kind     string
	pid      int // 0 while no process runs
	restarts int
	why      string // of the last exit
	address  string // "" until registered
	served   bool   // this process was registered once
	dataPID  string // process that the registration speaks of
	status   *inferencev1.GetInferenceStatusResponse
}

func (w workerView) healthy() bool {
	return w.pid != 0 && w.address != "" && w.dataPID == fmt.Sprint(w.pid)
}

func newView(run *Run) view {
	return view{run: run, workers: map[string]workerView{}, waits: map[string]string{}}
}

// queues says how much work stands where. In flight is what was issued and is nowhere else.
func (v *view) queues() *runv1.Queues {
	q := &runv1.Queues{
		Ready: v.ledger.GetReady(), Leased: v.ledger.GetLeased(), Consumed: v.ledger.GetConsumed(), Excluded: v.ledger.GetExcluded(),
	}
	elsewhere := v.first + q.GetReady() + q.GetLeased() + q.GetConsumed() + q.GetExcluded()
	if v.position > elsewhere {
		q.InFlight = v.position - elsewhere
	}
	return q
}

// status composes what watchers see.
func (v *view) status() *runv1.RunStatus {
	run := proto.CloneOf(v.run)
	advance(run, v.progress)
	s := &runv1.RunStatus{Run: run, Queues: v.queues(), Workers: v.workerList(), WaitingFor: v.waiting}
	if v.waiting != "" {
		s.WaitingSince = timestamppb.New(v.since)
	}
	if v.progress != nil && active(run.GetState()) {
		s.Phase = v.progress.GetPhase().String()[len("PHASE_"):]
	}
	if v.rows > 0 {
		s.Cursor = cursorMessage(v.position, v.rows)
	}
	return s
}

func cursorMessage(position, rows uint64) *runv1.Cursor {
	place := dataset.PlaceOf(position, rows)
	return &runv1.Cursor{Position: position, Epoch: place.Epoch, Index: place.Index, Rows: rows}
}

func (v *view) workerList() []*runv1.Worker {
	var out []*runv1.Worker
	for _, id := range slices.Sorted(maps.Keys(v.workers)) {
		w := v.workers[id]
		m := &runv1.Worker{
			WorkerId: id, Kind: w.kind, Address: w.address, Healthy: w.healthy(), Pid: uint32(w.pid), Restarts: uint32(w.restarts),
			Activity: w.activity(),
		}
		if w.kind == "learner" {
			m.WeightsVersion = v.progress.GetStep()
		}
		if st := w.status; st != nil && w.healthy() {
			m.WeightsVersion, m.Activity = st.GetReceipt().GetVersion(), st.GetActivity()
			m.SamplesPerSecond, m.TokensPerSecond = st.GetSamplesPerSecond(), st.GetTokensPerSecond()
		}
		out = append(out, m)
	}
	slices.SortStableFunc(out, func(a, b *runv1.Worker) int { return cmp.Compare(a.GetKind(), b.GetKind()) })
	return out
}

func (w workerView) activity() string {
	switch {
	case w.pid == 0 && w.why != "":
		return "is started again: it " + w.why
	case w.pid == 0:
		return "is being started"
	case !w.healthy():
		return "starts and loads the model"
	}
	return ""
}

// waitingFor names what the run waits for and who owns that: a person, a part of the control plane, workers, the learner.
func (v *view) waitingFor() string {
	if !active(v.run.GetState()) {
		return ""
	}
	if v.run.GetState() == Paused {
		return "somebody to resume the run (it was paused by request)"
	}
	var waits []string
	for _, what := range slices.Sorted(maps.Keys(v.waits)) {
		waits = append(waits, what+": "+v.waits[what])
	}
	waits = append(waits, v.absent()...)
	if text := v.progress.GetWaitingFor(); text != "" && !v.lacksLearner() {
		waits = append(waits, text)
	}
	return strings.Join(waits, "; ")
}

// lacksLearner reports whether the controller waits for the learner that is on its way.
func (v *view) lacksLearner() bool {
	for _, w := range v.workers {
		if w.kind == "learner" && !w.healthy() {
			return true
		}
	}
	return false
}

// absent is what the workers that do not serve yet are waited for, those with the same reason together.
func (v *view) absent() []string {
	by := map[string][]string{}
	var order []string
	for _, id := range slices.Sorted(maps.Keys(v.workers)) {
		w := v.workers[id]
		if w.healthy() {
			continue
		}
		what := "to load the model (worker process)"
		if w.served {
			what = "to come back or end: it left the registry (worker process)"
		}
		if w.pid == 0 {
			what = "to be started (scheduler)"
			if w.why != "" {
				what = "to be started again (scheduler): it " + w.why
			}
		}
		if by[what] == nil {
			order = append(order, what)
		}
		by[what] = append(by[what], id)
	}
	var out []string
	for _, what := range order {
		out = append(out, strings.Join(by[what], " and ")+" "+what)
	}
	return out
}

// settle takes note of since when the run has waited for what it waits for.
func (v *view) settle(now time.Time) {
	if text := v.waitingFor(); text != v.waiting {
		v.waiting, v.since = text, now
	}
}

// ---- what the parts see -----------------------------------------------------------------------

// update changes the view and wakes whoever waits for a change.
func (c *conductor) update(change func(*view)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.view)
	c.view.settle(c.svc.Now().UTC())
	close(c.changed)
	c.changed = make(chan struct{})
}

// changes is closed at the next change of the view.
func (c *conductor) changes() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// see takes a record over. The caller holds records, so that views change in the order of the writes.
func (c *conductor) see(run *Run) { c.update(func(v *view) { v.run = run }) }

func (c *conductor) seeLedger(l *bufferv1.LedgerState) { c.update(func(v *view) { v.ledger = l }) }

func (c *conductor) seePosition(p uint64) {
	c.update(func(v *view) { v.position, v.first, v.rows = p, c.window.First, c.rows })
}

func (c *conductor) seeProgress(p *learnerv1.Progress) {
	if p != nil {
		c.update(func(v *view) { v.progress = p })
	}
}

// waitFor shows what is waited for and why; an empty why takes it off.
func (c *conductor) waitFor(what, why string) {
	c.mu.Lock()
	same := c.view.waits[what] == why
	c.mu.Unlock()
	if same {
		return
	}
	c.update(func(v *view) {
		if v.waits[what] = why; why == "" {
			delete(v.waits, what)
		}
	})
}

func (c *conductor) ledger() *bufferv1.LedgerState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view.ledger
}

func (c *conductor) state() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view.run.GetState()
}
