package buffer

import (
	"context"
	"sync"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// hub holds the newest state of a ledger and wakes those who wait for another. It never blocks who publishes, and who is slow
// sees the newest state alone.
type hub struct {
	mu       sync.Mutex
	revision uint64
	state    *bufferv1.LedgerState // not changed after it was published; nil before the first
	changed  chan struct{}         // closed at the next change
}

func newHub() *hub { return &hub{changed: make(chan struct{})} }

// publish takes a state unless a newer one is there: transactions end in order, their callers need not.
func (h *hub) publish(revision uint64, state *bufferv1.LedgerState) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if revision < h.revision || revision == h.revision && h.state != nil {
		return
	}
	h.revision, h.state = revision, state
	close(h.changed)
	h.changed = make(chan struct{})
}

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
		WeightsVersion: l.WeightsVersion, WeightsDigest: l.WeightsDigest,
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
