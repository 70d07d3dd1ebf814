package scheduler

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/refusal"
	"github.com/rollout-rl/rollout/libs/worker"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
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
	crowd    crowd

	waits   map[string]string // what is waited for -> why it takes long
	current []*waitv1.Wait    // as of the last settle
	waiting string            // the evidence of all waits
	since   time.Time         // when `waiting` changed last
}

func newView(run *Run) view {
	return view{run: run, crowd: newCrowd(), waits: map[string]string{}}
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
	for _, id := range slices.Sorted(maps.Keys(v.crowd.workers)) {
		w := v.crowd.workers[id]
		m := &runv1.Worker{
			WorkerId: id, Kind: w.kind, Address: w.address, Healthy: w.healthy(), ProcessId: w.process, Pid: uint32(w.pid), Restarts: uint32(w.restarts),
			Activity: w.activity(),
		}
		if w.kind == worker.Learner.Name {
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
	case w.process == "" && w.why != "":
		return "is started again: it " + w.why
	case w.process == "":
		return "is being started"
	case !w.healthy():
		return "starts and loads the model"
	}
	return ""
}

// waitsForSomebody is what a run waits for that a refused gradient has paused.
func waitsForSomebody(run *Run) string {
	return "somebody to start a run with other settings (`rollout run --config FILE --from " + run.GetRunId() + "`), to cancel this one, or to try the step again " +
		"(`rollout runs resume " + run.GetRunId() + "`), which gives the same gradient unless the machine was at fault: " + run.GetMessage()
}

// currentWaits lists what the run waits for, with who can end each wait: the user, a service, workers.
func (v *view) currentWaits() []*waitv1.Wait {
	if !active(v.run.GetState()) {
		return nil
	}
	resume := "rollout runs resume " + v.run.GetRunId()
	if refusal.Paused(v.run) {
		return []*waitv1.Wait{{Owner: "user", Reason: v.run.GetReason(), Evidence: waitsForSomebody(v.run), Fix: resume}}
	}
	if v.run.GetState() == Paused && v.run.GetReason() != "" {
		return []*waitv1.Wait{{Owner: "scheduler", Reason: v.run.GetReason(), Evidence: "what paused the run to be over: " + v.run.GetMessage()}}
	}
	if v.run.GetState() == Paused {
		return []*waitv1.Wait{{Owner: "user", Reason: "PAUSED", Evidence: "somebody to resume the run (it was paused by request)", Fix: resume}}
	}
	var waits []*waitv1.Wait
	for _, what := range slices.Sorted(maps.Keys(v.waits)) {
		waits = append(waits, &waitv1.Wait{Owner: ownerOf(what), Reason: "NO_ANSWER", Evidence: what + ": " + v.waits[what]})
	}
	absent := v.crowd.absent()
	waits = append(waits, absent.waits...)
	if text := v.progress.GetWaitingFor(); text != "" && !absent.learner { // the learner that the controller waits for is on its way
		waits = append(waits, &waitv1.Wait{Owner: ownerOf(text), Reason: v.progress.GetPhase().String()[len("PHASE_"):], Evidence: text})
	}
	return waits
}

// ownerOf returns the words in parentheses at the end of a sentence, which name the owner of the wait.
func ownerOf(sentence string) string {
	at := strings.LastIndex(sentence, "(")
	if owner, found := strings.CutSuffix(sentence[at+1:], ")"); at >= 0 && found {
		return owner
	}
	return "learner-controller"
}

// settle records the waits of now. A wait that continues keeps its time.
func (v *view) settle(now time.Time) {
	since := map[string]*timestamppb.Timestamp{}
	for _, wait := range v.current {
		since[wait.GetEvidence()] = wait.GetSince()
	}
	var sentences []string
	v.current = nil
	for _, wait := range v.currentWaits() {
		wait = proto.CloneOf(wait)
		if wait.Since = since[wait.GetEvidence()]; wait.Since == nil {
			wait.Since = timestamppb.New(now)
		}
		v.current, sentences = append(v.current, wait), append(sentences, wait.GetEvidence())
	}
	if text := strings.Join(sentences, "; "); text != v.waiting {
		v.waiting, v.since = text, now
	}
}
