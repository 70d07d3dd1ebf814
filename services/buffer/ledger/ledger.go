// Package ledger decides what becomes of trajectories: which samples are accepted, which groups a
// step takes, and when a step is committed. It does no I/O; it reads and writes rows through Reader
// and Tx, which an adapter implements.
//
// A group is one position in the order of the dataset. Each arrow is one transaction. The ledger is
// never rolled back.
//
//	            first sample        last sample, digests known
//	(unknown)    ---------> OPEN ---------------------> READY ---lease---> LEASED ---commit---> CONSUMED
//	     |                  |  ^                          |
//	     | reissue   failed,|  | reissue,                 | stale at lease,
//	     |          refused |  | sample of a new attempt  | digest refused
//	     |                  v  |                          |
//	     +--------------> DISSOLVED <---------------------+
//
//	unknown, OPEN, READY, DISSOLVED ---exclude---> EXCLUDED
//	                           OPEN ---last sample, all rewards equal---> EXCLUDED, with dynamic sampling (dynamic.go)
//
// A sample is stored once: the first accepted one of (run, epoch, index, attempt, sample, part) is
// kept. Duplicates, samples of an older attempt, and samples of a group that is past READY are
// dropped and counted. If a sample's receipt names a version whose digest is not recorded yet, the
// sample is stored, but its group becomes READY only after the digest was recorded and matches.
package ledger

import (
	"fmt"
	"slices"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// State is the state of a group. The zero State is a group without a row.
type State = bufferv1.GroupState

// The states of the drawing above.
const (
	Open      = bufferv1.GroupState_GROUP_STATE_OPEN
	Ready     = bufferv1.GroupState_GROUP_STATE_READY
	Leased    = bufferv1.GroupState_GROUP_STATE_LEASED
	Consumed  = bufferv1.GroupState_GROUP_STATE_CONSUMED
	Excluded  = bufferv1.GroupState_GROUP_STATE_EXCLUDED
	Dissolved = bufferv1.GroupState_GROUP_STATE_DISSOLVED
)

// transitions lists the arrows of the drawing.
var transitions = map[State][]State{
	0:         {Open, Dissolved, Excluded},
	Open:      {Open, Ready, Dissolved, Excluded},
	Ready:     {Leased, Dissolved, Excluded},
	Leased:    {Consumed},
	Dissolved: {Open, Excluded},
}

// Ledger is the ledger of one run without its groups.
type Ledger struct {
	Run            string
	Config         *bufferv1.LedgerConfig
	Closed         bool   // ingest is stopped
	Revision       uint64 // incremented by every transaction
	Step           uint64 // last committed step
	Chain          string // chain digest of that step
	Arrivals       uint64 // groups that were completed or excluded so far
	Trimmed        uint64 // payloads of steps up to this one may be deleted
	WeightsVersion uint64 // newest recorded version
	WeightsDigest  string
	Groups         [7]uint64 // number of groups by State
	Samples        uint64
	Duplicates     uint64
	Refused        uint64
	InfraFailed    uint64
	Failures       map[string]uint64 // of those, by reason, since the ledger counts them; see fail
	Skipped        uint64            // excluded groups that a leased or committed step has passed
	Lineage        uint32            // newest lineage of the weights
}

// Group is one prompt group with its newest attempt.
type Group struct {
	Position     uint64
	Attempt      uint32
	State        State
	Reason       string
	Step         uint64
	Samples      uint32 // distinct samples that were accepted
	Pending      uint32 // rows whose weights digest is not recorded yet
	Failures     uint32
	MinVersion   uint64 // oldest weights version of its samples
	Arrival      uint64 // number in the order of completion and exclusion, from 1; 0 before
	TokenRewards bool   // a sample has rewards per token, so samples with equal rewards may differ
}

// Sample is one accepted sample, or a part of one, of a group's newest attempt.
type Sample struct {
	Position       uint64
	Sample         uint32
	Part           uint32
	Attempt        uint32
	Segment        uint32 // 0: the payload is in the storage service
	Offset         uint64
	Length         uint64
	CRC            uint32
	Ref            string // content id in the storage service
	Reward         float64
	Outcome        trajectoryv1.Outcome
	MinVersion     uint64
	ReceiptVersion uint64
	ReceiptDigest  string // "" once it was verified against the recorded digest
	Times          []byte // trajectoryv1.EpisodeTimes, at most TimesBytes; nil: not known
}

// Step is a leased step. It is committed once Chain is set.
type Step struct {
	Step          uint64
	Batch         string
	Groups        uint32
	Samples       uint32
	Excluded      uint32
	WeightsDigest string
	Chain         string
	Zero          uint32  // excluded groups with ReasonZeroAdvantage
	ZeroReward    float64 // mean reward of those
	End           uint64  // position at which the next step begins
	Lineage       uint32  // of the weights that it made
}

// Segment is a segment file as the ledger knows it.
type Segment struct {
	Number  uint32
	Bytes   uint64 // durable bytes; what follows them in the file does not count
	Trimmed bool
}

// position of a group over all epochs. ErrRange.
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

// window is the range of positions of a step if leases go by position; with dynamic sampling, the
// longest possible range.
func (l *Ledger) window(step uint64) (from, to uint64) {
	c := l.Config
	if l.dynamic() {
		return l.next(), l.next() + l.drawLimit()
	}
	n := uint64(c.GetGroupsPerStep())
	from = c.GetFirstPosition() + c.GetCarried() + (step-c.GetFirstStep()-1)*n
	return from, from + n
}

// move changes the state of a group and updates the counts. ErrGroupState.
func (l *Ledger) move(g *Group, to State, reason string) error {
	if !slices.Contains(transitions[g.State], to) {
		return fmt.Errorf("group at position %d, attempt %d: %s to %s: %w", g.Position, g.Attempt, stateName(g.State), stateName(to),
			ErrGroupState.With("position", fmt.Sprint(g.Position)).With("state", stateName(g.State)))
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

// stateName is a state in a message for people.
func stateName(s State) string {
	return map[State]string{0: "unknown", Open: "open", Ready: "ready", Leased: "leased", Consumed: "consumed",
		Excluded: "excluded", Dissolved: "dissolved"}[s]
}

// distinct sorts numbers and removes duplicates. It reuses the slice.
func distinct(numbers []uint64) []uint64 {
	slices.Sort(numbers)
	return slices.Compact(numbers)
}

// distinctCopy is distinct on a copy.
func distinctCopy(numbers []uint64) []uint64 { return distinct(slices.Clone(numbers)) }

// unique keeps the first of each number, in order. It reuses the slice.
func unique(numbers []uint64) []uint64 {
	known := make(map[uint64]bool, len(numbers))
	return slices.DeleteFunc(numbers, func(n uint64) bool {
		duplicate := known[n]
		known[n] = true
		return duplicate
	})
}
