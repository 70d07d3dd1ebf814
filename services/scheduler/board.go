package scheduler

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/wait"
	"github.com/rollout-rl/rollout/libs/worker"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	"github.com/rollout-rl/rollout/services/scheduler/dataset"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// board holds what the parts of one active run observed last, and wakes those that wait for a
// change. Messages on it are never modified, only replaced. Safe for concurrent use.
type board struct {
	now func() time.Time

	mu      sync.Mutex
	view    view
	changed chan struct{} // closed and replaced on each change
}

func newBoard(run *Run, now func() time.Time) *board {
	return &board{now: now, view: newView(run), changed: make(chan struct{})}
}

// update changes the view and wakes all waiters.
func (b *board) update(change func(*view)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change(&b.view)
	b.view.settle(b.now().UTC())
	close(b.changed)
	b.changed = make(chan struct{})
}

// read calls look with the view, which look must not modify or keep.
func (b *board) read(look func(*view)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	look(&b.view)
}

// Changes is closed at the next change of the view.
func (b *board) Changes() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.changed
}

// setRecord is called in the order of the writes to the store (see records.update).
func (b *board) setRecord(run *Run) { b.update(func(v *view) { v.run = run }) }

// SetLedger replaces the state of the ledger.
func (b *board) SetLedger(l *bufferv1.LedgerState) { b.update(func(v *view) { v.ledger = l }) }

// SetPosition replaces the position of the cursor.
func (b *board) SetPosition(position, first, rows uint64) {
	b.update(func(v *view) { v.position, v.first, v.rows = position, first, rows })
}

// setProgress replaces the progress of the controller; nil is ignored.
func (b *board) setProgress(p *learnerv1.Progress) {
	if p != nil {
		b.update(func(v *view) { v.progress = p })
	}
}

// WaitFor shows what the run waits for and why; an empty reason ends the wait.
func (b *board) WaitFor(what retry.Awaited, why string) { b.wait(what, obstacle{why: why}) }

// blocked shows what the run waits for and the error that is why; nil ends the wait.
func (b *board) blocked(what retry.Awaited, err error) {
	var o obstacle
	if err != nil {
		o = obstacle{why: rpcerr.Text(err), full: rpcerr.DiskFull(err)}
	}
	b.wait(what, o)
}

func (b *board) wait(what retry.Awaited, o obstacle) {
	b.mu.Lock()
	same := b.view.waits[what] == o
	b.mu.Unlock()
	if same {
		return
	}
	b.update(func(v *view) {
		if v.waits[what] = o; o.why == "" {
			delete(v.waits, what)
		}
	})
}

// changeWorker changes one worker.
func (b *board) changeWorker(id string, change func(*workerView)) {
	b.update(func(v *view) {
		w := v.fleet.workers[id]
		change(&w)
		v.fleet.put(id, w)
	})
}

// waitForWorker waits until a worker is as wanted.
func (b *board) waitForWorker(ctx context.Context, id string, wanted func(workerView) bool) error {
	for {
		b.mu.Lock()
		changed := b.view.fleet.changes(id)
		reached := wanted(b.view.fleet.workers[id])
		b.mu.Unlock()
		if reached {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// workers returns a copy of the workers by id.
func (b *board) workers() (workers map[string]workerView) {
	b.read(func(v *view) { workers = maps.Clone(v.fleet.workers) })
	return workers
}

// Ledger is the newest state of the ledger; nil before the first one.
func (b *board) Ledger() (l *bufferv1.LedgerState) {
	b.read(func(v *view) { l = v.ledger })
	return l
}

// State is the state of the run.
func (b *board) State() (s State) {
	b.read(func(v *view) { s = v.run.GetState() })
	return s
}

// record is a copy of the newest record of the run.
func (b *board) record() (run *Run) {
	b.read(func(v *view) { run = proto.CloneOf(v.run) })
	return run
}

func (b *board) queues() (q *runv1.Queues) {
	b.read(func(v *view) { q = v.queues() })
	return q
}

func (b *board) progress() (p *learnerv1.Progress) {
	b.read(func(v *view) { p = v.progress })
	return p
}

func (b *board) status() (s *runv1.RunStatus) {
	b.read(func(v *view) { s = v.status() })
	return s
}

// view is the content of a board.
type view struct {
	run      *Run
	ledger   *bufferv1.LedgerState
	position uint64
	first    uint64
	rows     uint64
	progress *learnerv1.Progress
	fleet    fleet
	gateway  string // URL that agents take prompts from; empty: not registered

	waits   map[retry.Awaited]obstacle
	current []*waitv1.Wait // as of the last settle
	waiting string         // the evidence of all waits
	since   time.Time      // when `waiting` changed last
}

// obstacle is why the run waits.
type obstacle struct {
	why  string
	full bool // a disk is full
}

func newView(run *Run) view {
	return view{run: run, fleet: newFleet(), waits: map[retry.Awaited]obstacle{}}
}

// stall is what stops the run until someone frees space on a disk: the buffer or the controller
// waits for it; nil if neither does.
func (v *view) stall() *waitv1.Wait {
	if stall := v.ledger.GetStall(); stall != nil {
		return stall
	}
	return v.progress.GetWait()
}

// queues counts the groups per stage. In flight is what was issued and is in no other stage.
func (v *view) queues() *runv1.Queues {
	q := &runv1.Queues{
		Ready: v.ledger.GetReady(), Leased: v.ledger.GetLeased(), Consumed: v.ledger.GetConsumed(), Excluded: v.ledger.GetExcluded(),
		Failures: v.ledger.GetFailures(),
	}
	elsewhere := v.first + q.GetReady() + q.GetLeased() + q.GetConsumed() + q.GetExcluded()
	if v.position > elsewhere {
		q.InFlight = v.position - elsewhere
	}
	return q
}

// status is the message for watchers.
func (v *view) status() *runv1.RunStatus {
	run := proto.CloneOf(v.run)
	advance(run, v.progress)
	s := &runv1.RunStatus{Run: run, Queues: v.queues(), Workers: v.workerList(), WaitingFor: v.waiting, Waits: v.current}
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
	lagging := map[string]*learnerv1.LaggingWorker{}
	for _, l := range v.progress.GetLagging() {
		lagging[l.GetWorkerId()] = l
	}
	for _, id := range slices.Sorted(maps.Keys(v.fleet.workers)) {
		w := v.fleet.workers[id]
		m := &runv1.Worker{
			WorkerId: id, Kind: w.kind, Address: w.address, Healthy: w.healthy(), ProcessId: w.process, Pid: uint32(w.pid), Restarts: uint32(w.restarts),
			Reserved: w.reserved,
			Activity: w.activity(),
		}
		if w.kind == worker.Learner.Name {
			m.WeightsVersion = v.progress.GetStep()
		}
		if st := w.status; st != nil && w.healthy() {
			m.WeightsVersion, m.Activity = st.GetReceipt().GetVersion(), st.GetActivity()
			m.SamplesPerSecond, m.TokensPerSecond = st.GetSamplesPerSecond(), st.GetTokensPerSecond()
		}
		if l := lagging[id]; l != nil && w.healthy() {
			m.Activity = fmt.Sprintf("could not load weights version %d and tries again: %s", l.GetVersion(), l.GetMessage())
			m.Waits = append(m.Waits, refused(l))
		}
		out = append(out, m)
	}
	slices.SortStableFunc(out, func(a, b *runv1.Worker) int { return cmp.Compare(a.GetKind(), b.GetKind()) })
	return out
}

// refused is the wait of a worker that could not load the newest weights.
func refused(l *learnerv1.LaggingWorker) *waitv1.Wait {
	w := &waitv1.Wait{
		Owner: l.GetWorkerId(), Reason: wait.WeightsRefused, Subjects: []string{l.GetWorkerId()},
		Evidence: fmt.Sprintf("%s could not load weights version %d, and tries again: %s", l.GetWorkerId(), l.GetVersion(), l.GetMessage()),
		Fix:      "correct what it reports: it tries again until it can; a worker that is killed is restarted, and loads them from the start",
	}
	if l.GetReason() == rpcerr.ReasonDiskFull {
		w.Owner, w.Reason, w.Fix = wait.User, rpcerr.ReasonDiskFull, wait.DiskFix(l.GetMessage())
	}
	return w
}

// waitsForUser is the wait of a run that a refused gradient, the health check, or a gate has
// paused.
func waitsForUser(run *Run) string {
	if run.GetReason() == refusal.PausedByGate {
		return "you to continue the run (`rollout runs resume " + run.GetRunId() + "`) or to cancel it: " + run.GetMessage()
	}
	if refusal.Health(run.GetReason()) {
		return "you to start a run with other settings, to cancel this one, or to continue it as it is (`rollout runs resume " + run.GetRunId() + "`): " +
			run.GetMessage()
	}
	return "you to start a run with other settings (`rollout run --config FILE --from " + run.GetRunId() + " --continue`), to cancel this one, or to try the step again " +
		"(`rollout runs resume " + run.GetRunId() + "`), which gives the same gradient unless the machine was at fault: " + run.GetMessage()
}

// currentWaits lists what the run waits for, with who can end each wait: the user, a service,
// workers.
func (v *view) currentWaits() []*waitv1.Wait {
	if !active(v.run.GetState()) {
		return nil
	}
	resume := "rollout runs resume " + v.run.GetRunId()
	if refusal.Paused(v.run) {
		return []*waitv1.Wait{{Owner: wait.User, Reason: v.run.GetReason(), Evidence: waitsForUser(v.run), Fix: resume}}
	}
	stall := v.stall()
	if v.run.GetState() == Paused && v.run.GetReason() != "" {
		if stall == nil { // the buffer and the controller have not reported since the run was resumed
			stall = &waitv1.Wait{Owner: wait.User, Reason: v.run.GetReason(), Evidence: v.run.GetMessage(), Fix: wait.DiskFix(v.run.GetMessage())}
		}
		return []*waitv1.Wait{stall}
	}
	if v.run.GetState() == Paused {
		return []*waitv1.Wait{{Owner: wait.User, Reason: wait.Paused, Evidence: "you to resume the run (it was paused by request)", Fix: resume}}
	}
	var waits []*waitv1.Wait
	if stall != nil {
		waits = append(waits, stall)
	}
	for _, what := range slices.SortedFunc(maps.Keys(v.waits), func(a, b retry.Awaited) int { return cmp.Compare(a.What, b.What) }) {
		o := v.waits[what]
		if o.full && stall != nil { // a consequence
			continue
		}
		waits = append(waits, o.wait(what))
	}
	absent := v.fleet.absent(v.run.GetRunId())
	waits = append(waits, absent.waits...)
	if absent.learner { // else the controller waits for the learner too
		return waits
	}
	for _, w := range v.progress.GetWaits() {
		if w.GetOwner() == wait.Agents {
			w = proto.CloneOf(w)
			w.Fix = "start an agent that takes prompts from " + cmp.Or(v.gateway, "the gateway") + ", or see why the running ones close no sessions"
			w.Evidence += ": " + w.GetFix()
		}
		waits = append(waits, w)
	}
	return waits
}

// wait is the wait for an answer.
func (o obstacle) wait(what retry.Awaited) *waitv1.Wait {
	w := &waitv1.Wait{Owner: what.Owner, Reason: wait.NoAnswer, Evidence: what.What + ": " + o.why, Subjects: []string{what.Owner}, Fix: fixes[what.Owner]}
	if what.Also != "" {
		w.Subjects = append(w.Subjects, what.Also)
	}
	if what.Owner == wait.Learner { // it answers, and is slower than the workers
		w.Reason, w.Subjects = wait.QueueFull, nil
	}
	if o.full {
		w.Owner, w.Reason, w.Fix = wait.User, rpcerr.ReasonDiskFull, wait.DiskFix(o.why)
	}
	return w
}

// fixes are what the owner of a wait for an answer can do.
var fixes = map[string]string{
	wait.NATS:            "check that the servers of `nats.url` run and have space (`rollout doctor`); the run then continues",
	"buffer":             "check that the buffer runs (`rollout status`); the run then continues",
	"learner-controller": "check that the learner-controller runs (`rollout status`); the run then continues",
	"scheduler":          "check the disk and the database of the scheduler (`rollout doctor`); the run then continues",
	wait.Learner:         "give the learner more cores or GPUs, or raise `limits.queue_bytes`",
}

// settle records the current waits. A wait that continues keeps its time.
func (v *view) settle(now time.Time) {
	since := map[string]*timestamppb.Timestamp{}
	same := func(w *waitv1.Wait) string {
		if w.GetReason() == rpcerr.ReasonDiskFull { // the evidence has numbers that change
			return w.GetReason()
		}
		return w.GetEvidence()
	}
	for _, w := range v.current {
		since[same(w)] = w.GetSince()
	}
	var sentences []string
	v.current = nil
	for _, w := range v.currentWaits() {
		w = proto.CloneOf(w)
		if w.Since = since[same(w)]; w.Since == nil {
			w.Since = timestamppb.New(now)
		}
		v.current, sentences = append(v.current, w), append(sentences, w.GetEvidence())
	}
	if text := strings.Join(sentences, "; "); text != v.waiting {
		v.waiting, v.since = text, now
	}
}
