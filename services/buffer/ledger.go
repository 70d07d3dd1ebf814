// Package buffer is the ledger of trajectories: what arrived, which step consumed it, and by which weights.
//
// A group (a position of the dataset's order) goes this way; every arrow is one transaction, and the ledger never rewinds:
//
//	            first sample        last sample, digests known
//	(unheard of) ---------> OPEN ---------------------> READY ---lease---> LEASED ---commit---> CONSUMED
//	     |                  |  ^                          |
//	     | reissue   failed,|  | reissue,                 | stale at lease,
//	     |          refused |  | sample of a new attempt  | digest refused
//	     |                  v  |                          |
//	     +--------------> DISSOLVED <---------------------+
//
//	unheard of, OPEN, READY, DISSOLVED ---exclude---> EXCLUDED
//	                              OPEN ---last sample, all rewards equal---> EXCLUDED, with dynamic sampling (draw.go)
//
// A sample is kept once: the first accepted of (run, epoch, index, attempt, sample, part) wins; a twin, a sample of an older
// attempt and one of a group that is past READY are dropped and counted. A sample whose receipt names a version that is not
// recorded yet is kept, but its group is not READY before the version's digest is there and agrees.
//
// What a step costs (bench_test.go: 32 groups of 8 samples in 32 messages, 2 cores): 6.5 ms of processor time for ingest, lease and
// commit together, and four fsyncs of 0.8 ms: segment and ledger rows at ingest, lease, commit. Wall time on a machine that five
// other processes kept busy: 6 ms for ingest, 5 for the lease, 2 for the commit. What was found on the way there:
//
//   - SQLite's planner preferred the primary key, so commits and watchers read the whole ledger, more with every step: such
//     statements now name their index, and a test asks for each plan.
//   - Parsing was a third of a transaction of 8 samples: statements are prepared once a connection. A context that can end costs a
//     goroutine a statement in the driver: only the transaction watches it.
//   - The segment's fsync runs beside the transaction's statements; its commit waits for both, and is itself not synced: a note in the
//     segment tells how to make the rows again (note.go, ADR 25).
//   - Rows go in by powers of two: 4 groups and 32 samples are two statements, where they were eight.
//   - To read the rows of a batch took as long as to write them: a lease knows those that this process has written (memory.go).
//   - A lease that waits looked at the ledger with each put of others: it does so now when a batch can be full.
//   - Group commit is worth most: 32 messages taken one by one cost three times the processor time of one batch. Messages that come
//     during a commit share the next one, so there is no timer that would hold up the last sample of a step.
package buffer

import (
	"fmt"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// State is where a group stands. The zero State is a group that was not heard of.
type State = bufferv1.GroupState

// The states, as drawn above.
const (
	Open      = bufferv1.GroupState_GROUP_STATE_OPEN
	Ready     = bufferv1.GroupState_GROUP_STATE_READY
	Leased    = bufferv1.GroupState_GROUP_STATE_LEASED
	Consumed  = bufferv1.GroupState_GROUP_STATE_CONSUMED
	Excluded  = bufferv1.GroupState_GROUP_STATE_EXCLUDED
	Dissolved = bufferv1.GroupState_GROUP_STATE_DISSOLVED
)

// moves lists the arrows of the drawing.
var moves = map[State][]State{
	0:         {Open, Dissolved, Excluded},
	Open:      {Open, Ready, Dissolved, Excluded},
	Ready:     {Leased, Dissolved, Excluded},
	Leased:    {Consumed},
	Dissolved: {Open, Excluded},
}

// Ledger is one run's ledger without its groups.
type Ledger struct {
	Run            string
	Config         *bufferv1.LedgerConfig
	Closed         bool   // ingest is stopped
	Incarnation    uint32 // highest of the run that opened it; 0: nobody conducts the run
	Revision       uint64 // grows with every transaction
	Step           uint64 // last committed
	Chain          string // its link
	Arrivals       uint64 // groups that were completed or excluded so far
	Trimmed        uint64 // payloads of steps through this one may be gone
	WeightsVersion uint64 // newest recorded
	WeightsDigest  string
	Groups         [7]uint64 // number of groups by State
	Samples        uint64
	Duplicates     uint64
	Refused        uint64
	InfraFailed    uint64
	Skipped        uint64 // excluded groups that a leased or committed step goes without
}

// Group is one prompt group with its newest attempt.
type Group struct {
	Position   uint64
	Attempt    uint32
	State      State
	Reason     string
	Step       uint64
	Samples    uint32 // distinct samples there
	Pending    uint32 // rows whose weights are not recorded yet
	Failures   uint32
	MinVersion uint64 // oldest weights version of its samples
	Arrival    uint64 // place in the order of completion and exclusion; 0 before
	// TokenRewards tells that tokens of a sample have rewards of their own: equal rewards don't make the samples equal.
	TokenRewards bool
}

// Sample is one accepted sample (or part of it) of a group's newest attempt.
type Sample struct {
	Position   uint64
	Sample     uint32
	Part       uint32
	Attempt    uint32 // the group's
	Segment    uint32 // 0: the payload is in the storage service
	Offset     uint64
	Length     uint64
	CRC        uint32
	Ref        string
	Reward     float64
	Outcome    trajectoryv1.Outcome
	MinVersion uint64
	// What the engine said of its weights. Digest is "" once it was found to agree with the record.
	ReceiptVersion uint64
	ReceiptDigest  string
}

// Step is a leased step, committed once WeightsDigest is set.
type Step struct {
	Step          uint64
	Batch         string
	Groups        uint32
	Samples       uint32
	Excluded      uint32
	WeightsDigest string
	Chain         string
	Zero          uint32  // of Excluded, those for ReasonZeroAdvantage
	ZeroReward    float64 // mean reward of those
	End           uint64  // position at which the next step begins
}

// Segment is one segment file as the ledger knows it.
type Segment struct {
	Number  uint32
	Bytes   uint64 // durable; a longer file has a torn tail
	Trimmed bool
}

// admit lets those act on the ledger who conduct its newest incarnation. 0: whoever asks conducts nothing. ErrStale.
func (l *Ledger) admit(incarnation uint32) error {
	if incarnation == 0 || incarnation >= l.Incarnation {
		return nil
	}
	return ErrStale.With("run", l.Run).With("incarnation", fmt.Sprint(incarnation)).With("newest", fmt.Sprint(l.Incarnation))
}

// position of a group over all epochs.
func (l *Ledger) position(epoch uint32, index uint64) (uint64, error) {
	rows := l.Config.GetRows()
	if index >= rows {
		return 0, ErrRange.With("index", fmt.Sprint(index)).With("rows", fmt.Sprint(rows))
	}
	p := uint64(epoch)*rows + index
	if p < l.Config.GetFirstPosition() {
		return 0, ErrRange.With("position", fmt.Sprint(p)).With("first_position", fmt.Sprint(l.Config.GetFirstPosition()))
	}
	return p, nil
}

func (l *Ledger) key(g *Group) *bufferv1.GroupKey {
	rows := l.Config.GetRows()
	return &bufferv1.GroupKey{Epoch: uint32(g.Position / rows), Index: g.Position % rows, Attempt: g.Attempt}
}

func (l *Ledger) record(g *Group) *bufferv1.GroupRecord {
	return &bufferv1.GroupRecord{
		Key: l.key(g), Position: g.Position, State: g.State, Reason: g.Reason, Step: g.Step, Samples: g.Samples, Failures: g.Failures,
		Pending: g.Pending, MinVersion: g.MinVersion, Arrival: g.Arrival,
	}
}

// window is the range of positions of a step where leases go by position; with dynamic sampling, the longest that it may have.
func (l *Ledger) window(step uint64) (from, to uint64) {
	c := l.Config
	if l.draws() {
		return l.next(), l.next() + l.most()
	}
	n := uint64(c.GetGroupsPerStep())
	from = c.GetFirstPosition() + (step-c.GetFirstStep()-1)*n
	return from, from + n
}

// move takes an arrow of the drawing and keeps the counts.
func (l *Ledger) move(g *Group, to State, reason string) error {
	allowed := false
	for _, s := range moves[g.State] {
		allowed = allowed || s == to
	}
	if !allowed {
		return l.conflict(g, to)
	}
	if g.State != 0 {
		l.Groups[g.State]--
	}
	l.Groups[to]++
	g.State, g.Reason = to, reason
	if (to == Ready || to == Excluded) && g.Arrival == 0 {
		l.Arrivals++
		g.Arrival = l.Arrivals
	}
	if to == Dissolved || to == Open {
		g.Samples, g.Pending, g.MinVersion, g.Arrival, g.TokenRewards = 0, 0, 0, 0, false
	}
	return nil
}

func (l *Ledger) conflict(g *Group, to State) error {
	return fmt.Errorf("group at position %d, attempt %d: %s to %s: %w", g.Position, g.Attempt, name(g.State), name(to),
		ErrGroupState.With("position", fmt.Sprint(g.Position)).With("state", name(g.State)))
}

// name is a state in a message for people.
func name(s State) string {
	return map[State]string{0: "unheard of", Open: "open", Ready: "ready", Leased: "leased", Consumed: "consumed",
		Excluded: "excluded", Dissolved: "dissolved"}[s]
}
