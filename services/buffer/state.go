package buffer

import (
	"sync"

	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// liveState holds the newest state of a ledger and wakes callers that wait for a change. Publishing
// never blocks; a slow watcher sees only the newest state. It implements ingest.State. Safe for
// concurrent use.
type liveState struct {
	mu       sync.Mutex
	revision uint64
	state    *bufferv1.LedgerState // never modified after it was published; nil before the first
	changed  chan struct{}         // closed at the next change

	stall       *waitv1.Wait // why nothing is ingested; nil if it is
	sampleBytes uint64       // average size of a payload
}

// averaged is about how many samples the average size goes back.
const averaged = 256

func newLiveState() *liveState { return &liveState{changed: make(chan struct{})} }

// publish sets the state, unless a newer one was published: transactions end in order, their
// callers may not.
func (s *liveState) publish(revision uint64, state *bufferv1.LedgerState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if revision < s.revision || revision == s.revision && s.state != nil {
		return
	}
	s.revision = revision
	s.set(state)
}

// set makes a state the newest one. The caller holds the lock.
func (s *liveState) set(state *bufferv1.LedgerState) {
	if state != nil {
		state.Stall, state.SampleBytes = s.stall, s.sampleBytes
	}
	s.state = state
	close(s.changed)
	s.changed = make(chan struct{})
}

// SetStalled implements ingest.State.
func (s *liveState) SetStalled(stall *waitv1.Wait) (changed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stall.GetReason() == stall.GetReason() {
		return false
	}
	s.stall = stall
	if s.state != nil {
		s.set(proto.CloneOf(s.state))
	}
	return true
}

// CountSamples implements ingest.State. The average is published with the next state.
func (s *liveState) CountSamples(samples int, bytes uint64) {
	if samples == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	mean, last := float64(bytes)/float64(samples), float64(s.sampleBytes)
	if last > 0 {
		mean = last + (mean-last)*min(1, float64(samples)/averaged)
	}
	s.sampleBytes = uint64(mean)
}

// invalidate drops a state that may be outdated, so that watchers read the ledger again.
func (s *liveState) invalidate() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(nil)
}

// newest is the newest state, or nil, and the channel that is closed at the next change.
func (s *liveState) newest() (*bufferv1.LedgerState, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state, s.changed
}
