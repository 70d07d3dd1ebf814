package buffer

import (
	"context"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// Store keeps ledgers. Adapters are folders beside this file and pass the suite in storetest. Safe for concurrent use.
type Store interface {
	// Create makes the ledger of a run; where there is one it does nothing. Durable when it returns.
	Create(ctx context.Context, run string, config *bufferv1.LedgerConfig) error
	// Runs lists the runs whose ledger is not closed.
	Runs(ctx context.Context) ([]string, error)
	// View runs fn on one consistent state. ErrNoLedger. It never waits for a writer.
	View(ctx context.Context, run string, fn func(Reader) error) error
	// Update runs fn in a transaction of its own; transactions of one ledger happen one after the other. When it returns nil the
	// changes and the Ledger (which fn may change in place) are durable, with Revision one higher. An error of fn undoes all and
	// comes back as it is. ErrNoLedger.
	Update(ctx context.Context, run string, fn func(Tx) error) error
}

// Reader reads one ledger at one moment. It is valid during the call that it was given to.
type Reader interface {
	// Ledger is the ledger itself.
	Ledger() *Ledger
	// Groups returns those of the positions that were heard of.
	Groups(ctx context.Context, positions []uint64) (map[uint64]*Group, error)
	// ListGroups returns groups by position.
	ListGroups(ctx context.Context, q GroupQuery) ([]*Group, error)
	// Arrived returns completed and excluded groups that no step has taken, in the order of arrival.
	Arrived(ctx context.Context, limit int) ([]*Group, error)
	// Samples returns the samples of the positions by position, sample and part.
	Samples(ctx context.Context, positions []uint64) ([]Sample, error)
	// BatchSamples returns the samples that a step has leased or consumed, without those of excluded groups, by position, sample and part.
	BatchSamples(ctx context.Context, step uint64) ([]Sample, error)
	// Pending returns the samples that wait for a version's digest.
	Pending(ctx context.Context, version uint64) ([]Sample, error)
	// Step returns a leased or committed step; nil where there is none.
	Step(ctx context.Context, step uint64) (*Step, error)
	// Steps returns committed steps from one on, in order.
	Steps(ctx context.Context, from uint64) ([]*Step, error)
	// Weights returns the recorded digests of the versions; unknown ones are left out.
	Weights(ctx context.Context, versions []uint64) (map[uint64]string, error)
	// Segments returns the segments by number.
	Segments(ctx context.Context) ([]Segment, error)
	// Uncovered returns the numbers of the segments that hold a sample which no step through the given one has consumed.
	Uncovered(ctx context.Context, through uint64) (map[uint32]bool, error)
}

// Tx is a Reader that writes. It sees its own writes.
type Tx interface {
	Reader
	// PutGroups inserts or replaces groups.
	PutGroups(ctx context.Context, groups []*Group) error
	// AddSamples inserts samples; none of their keys is taken.
	AddSamples(ctx context.Context, samples []Sample) error
	// DropSamples removes all samples of a group.
	DropSamples(ctx context.Context, position uint64) error
	// Verify takes the digests off the samples that wait for a version.
	Verify(ctx context.Context, version uint64) error
	// PutStep inserts or replaces a step.
	PutStep(ctx context.Context, step *Step) error
	// TakeGroups moves every group of the step's batch from one state to another and says how many they were. The caller keeps
	// the Ledger's counts.
	TakeGroups(ctx context.Context, step uint64, from, to State) (uint64, error)
	// PutWeights records a version's digest; the version is not recorded yet.
	PutWeights(ctx context.Context, version uint64, digest string) error
	// PutSegment inserts or replaces a segment.
	PutSegment(ctx context.Context, segment Segment) error
}

// GroupQuery narrows groups.
type GroupQuery struct {
	From   uint64  // first position
	To     uint64  // one past the last position; 0: no end
	States []State // only these; none: all
	Limit  int     // most groups; 0: all
}
