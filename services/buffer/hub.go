package buffer

import (
	"context"
	"sync"

	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// hub holds the newest state of a ledger and wakes those who wait for another. It never blocks who publishes, and who is slow
// sees the newest state alone.
type hub struct {
	mu       sync.Mutex
	revision uint64
	state    *bufferv1.LedgerState // not changed after it was published; nil before the first
	changed  chan struct{}         // closed at the next change
	aside    aside
}

// aside is what is told with each state and is not of the ledger.
type aside struct {
	reason, message string // why nothing is ingested; "" while it is
	sampleBytes     uint64
}

func newHub() *hub { return &hub{changed: make(chan struct{})} }

// publish takes a state unless a newer one is there: transactions end in order, their callers need not.
func (h *hub) publish(revision uint64, state *bufferv1.LedgerState) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if revision < h.revision || revision == h.revision && h.state != nil {
		return
	}
	h.revision = revision
	h.show(state)
}

// show makes a state the newest. The caller holds the lock.
func (h *hub) show(state *bufferv1.LedgerState) {
	state.StalledReason, state.StalledMessage, state.SampleBytes = h.aside.reason, h.aside.message, h.aside.sampleBytes
	h.state = state
	close(h.changed)
	h.changed = make(chan struct{})
}

// stall says why nothing is ingested, "" where it is. It reports whether that is news.
func (h *hub) stall(reason, message string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.aside.reason == reason {
		return false
	}
	h.aside.reason, h.aside.message = reason, message
	if h.state != nil {
		h.show(proto.CloneOf(h.state))
	}
	return true
}

// weigh takes the payloads of some samples into the average, which is told with the next state.
func (h *hub) weigh(samples int, bytes uint64) {
	if samples == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	mean, was := float64(bytes)/float64(samples), float64(h.aside.sampleBytes)
	if was > 0 {
		mean = was + (mean-was)*min(1, float64(samples)/weighed)
	}
	h.aside.sampleBytes = uint64(mean)
}

// weighed is about how many samples the average goes back.
const weighed = 256

// forget drops a state that may be old, so that who waits reads the ledger again.
func (h *hub) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state = nil
	close(h.changed)
	h.changed = make(chan struct{})
}

// now is the newest state and the channel that closes when another takes its place.
func (h *hub) now() (*bufferv1.LedgerState, <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state, h.changed
}

// tell renders the state of a ledger.
func tell(ctx context.Context, r Reader) (*bufferv1.LedgerState, error) {
	l := r.Ledger()
	state := &bufferv1.LedgerState{
		Step: l.Step, Open: l.Groups[Open], Ready: l.Groups[Ready], Leased: l.Groups[Leased], Consumed: l.Groups[Consumed],
		Excluded: l.Groups[Excluded], Samples: l.Samples, Duplicates: l.Duplicates, Refused: l.Refused, InfraFailed: l.InfraFailed,
		WeightsVersion: l.WeightsVersion, WeightsDigest: l.WeightsDigest, Skipped: l.Skipped,
	}
	if l.Groups[Dissolved] == 0 {
		return state, nil
	}
	groups, err := r.ListGroups(ctx, GroupQuery{States: []State{Dissolved}})
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		state.Dissolved = append(state.Dissolved, l.record(g))
	}
	return state, nil
}
