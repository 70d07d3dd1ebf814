package buffer

import (
	"cmp"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/wait"
	"github.com/rollout-rl/rollout/proto/gen/names"
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

	writing time.Time // when the ingest that has not ended began; zero: there is none
	failing error     // of the last ingest; nil: it succeeded
}

// slowIngest is how long an ingest may take before it counts as the cause of a wait.
const slowIngest = 2 * time.Second

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

// BeginIngest implements ingest.State.
func (s *liveState) BeginIngest() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writing = time.Now()
}

// EndIngest implements ingest.State.
func (s *liveState) EndIngest(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writing, s.failing = time.Time{}, err
}

// ingestWait is why samples that have arrived are not in the ledger; nil if they are.
func (s *liveState) ingestWait() *waitv1.Wait {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &waitv1.Wait{Owner: names.BufferService, Reason: wait.IngestFails, Subjects: []string{names.BufferService}}
	switch {
	case s.failing != nil:
		w.Evidence = "the buffer to write the samples that have arrived, which fails: " + rpcerr.Text(s.failing)
		w.Fix = cmp.Or(rpcerr.Fix(s.failing), "correct what this error reports: the buffer tries again until it can write (`rollout doctor` checks its database, its disk and its bucket)")
	case !s.writing.IsZero() && time.Since(s.writing) > slowIngest:
		w.Evidence = "the buffer to write the samples that have arrived: its database or its disk has not answered for seconds"
		w.Fix = "check that no other process has locked the database (`fuser FOLDER/db/buffer.sqlite`, or pg_blocking_pids() of PostgreSQL), and the disk (`rollout doctor`)"
	default:
		return nil
	}
	return w
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
