package ledger

import (
	"context"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
)

// Store stores ledgers. Adapters are in folders next to this package and pass the suite in
// storetest. Safe for concurrent use.
type Store interface {
	// Create creates the ledger of a run, or does nothing if there is one. A ledger that begins with
	// groups of a snapshot is closed, so that nothing is ingested before it has them. Durable when it
	// returns. fence.ErrFenced, fence.ErrDeleted; then nothing is created.
	Create(ctx context.Context, run string, config *bufferv1.LedgerConfig, by *fencev1.Fence) error
	// Bury is Reader.Admit for the deletion of a run, which gets no ledger from then on. It may have
	// none.
	Bury(ctx context.Context, run string, by *fencev1.Fence) error
	// Runs lists the runs whose ledger is not closed.
	Runs(ctx context.Context) ([]string, error)
	// WithUnused lists the runs with unused payloads, also those whose ledger is closed.
	WithUnused(ctx context.Context) ([]string, error)
	// Delete deletes the ledger of a run in transactions of bounded size, the row of the ledger last.
	// An unknown run is no error.
	Delete(ctx context.Context, run string) error
	// View runs fn on a consistent snapshot. It never waits for a writer. ErrNoLedger.
	View(ctx context.Context, run string, fn func(Reader) error) error
	// Update runs fn in a transaction; the transactions of one ledger are serialized. fn may change
	// the Ledger in place. When Update returns nil, all changes are durable and Revision is one
	// higher. If fn returns an error, nothing is changed and the error is returned as it is. fn may
	// be called more than once. ErrNoLedger.
	Update(ctx context.Context, run string, fn func(Tx) error) error
}

// Reader reads one ledger at one moment. It is valid during the call that it was passed to.
type Reader interface {
	// Ledger is the ledger itself.
	Ledger() *Ledger
	// Admit refuses a change that a former leader decided. A Tx also remembers who decided it. nil: a
	// program without a scheduler. fence.ErrFenced.
	Admit(ctx context.Context, by *fencev1.Fence) error
	// Groups returns the groups at the positions; positions without a row are left out.
	Groups(ctx context.Context, positions []uint64) (map[uint64]*Group, error)
	// ListGroups returns groups by position.
	ListGroups(ctx context.Context, q GroupQuery) ([]*Group, error)
	// Arrived returns completed and excluded groups that no step has taken, in the order of
	// arrival.
	Arrived(ctx context.Context, limit int) ([]*Group, error)
	// Samples returns the samples of the positions by position, sample, and part.
	Samples(ctx context.Context, positions []uint64) ([]Sample, error)
	// BatchSamples returns the samples of a leased or committed step, without those of excluded
	// groups, by position, sample, and part.
	BatchSamples(ctx context.Context, step uint64) ([]Sample, error)
	// Taken returns the groups that a leased or committed step has taken or passed, by position.
	Taken(ctx context.Context, step uint64) ([]*Group, error)
	// Pending returns the samples that wait for the digest of a version.
	Pending(ctx context.Context, version uint64) ([]Sample, error)
	// Step returns a leased or committed step, or nil.
	Step(ctx context.Context, step uint64) (*Step, error)
	// Count returns the number of groups at positions from a first one up to end.
	Count(ctx context.Context, from, end uint64) (uint64, error)
	// End returns the position after the last group, or 0.
	End(ctx context.Context) (uint64, error)
	// Steps returns committed steps in order.
	Steps(ctx context.Context, q StepQuery) ([]*Step, error)
	// Weights returns the recorded weights of the versions, by version and lineage.
	Weights(ctx context.Context, versions []uint64) ([]Weights, error)
	// ListWeights returns the weights of at most limit versions, from a version on, by version and
	// lineage.
	ListWeights(ctx context.Context, from uint64, limit int) ([]Weights, error)
	// Lineages returns the lineages by number, without lineage 0.
	Lineages(ctx context.Context) ([]Lineage, error)
	// Segments returns the segments by number.
	Segments(ctx context.Context) ([]Segment, error)
	// Uncovered returns the numbers of the segments with a sample that no step up to the given one
	// has consumed.
	Uncovered(ctx context.Context, through uint64) (map[uint32]bool, error)
	// Unused returns payloads of the storage service that were marked as unused, at most limit. needed
	// are those that a sample whose payload is not trimmed has.
	Unused(ctx context.Context, limit int) (unused, needed []string, err error)
}

// Tx is a Reader that also writes. It sees its own writes.
type Tx interface {
	Reader
	// PutGroups inserts or replaces groups.
	PutGroups(ctx context.Context, groups []*Group) error
	// AddSamples inserts samples, none of which exists.
	AddSamples(ctx context.Context, samples []Sample) error
	// MarkUnused marks payloads of the storage service as unused.
	MarkUnused(ctx context.Context, refs []string) error
	// MarkTrimmed marks the payloads of the steps after one up to another as unused, those in the
	// storage service.
	MarkTrimmed(ctx context.Context, after, through uint64) error
	// Forget removes the marks of payloads.
	Forget(ctx context.Context, refs []string) error
	// DropSamples deletes all samples of a group and marks their payloads as unused.
	DropSamples(ctx context.Context, position uint64) error
	// Verify clears the receipt digests of the samples that wait for a version.
	Verify(ctx context.Context, version uint64) error
	// PutStep inserts or replaces a step.
	PutStep(ctx context.Context, step *Step) error
	// TakeGroups moves every group of a step's batch from one state to another and returns their
	// number. The caller updates the counts of the Ledger.
	TakeGroups(ctx context.Context, step uint64, from, to State) (uint64, error)
	// PutWeights inserts a version that its lineage does not have yet.
	PutWeights(ctx context.Context, weights Weights) error
	// PutLineage inserts a lineage that does not exist yet.
	PutLineage(ctx context.Context, lineage Lineage) error
	// PutSegment inserts or replaces a segment.
	PutSegment(ctx context.Context, segment Segment) error
}

// GroupQuery selects groups.
type GroupQuery struct {
	From   uint64  // first position
	To     uint64  // position after the last one; 0: no end
	States []State // only groups in these states; empty: all
	Limit  int     // largest number of groups; 0: all
}

// StepQuery selects committed steps.
type StepQuery struct {
	From   uint64 // first step
	To     uint64 // step after the last one; 0: no end
	Limit  int    // largest number of steps
	Newest bool   // the last ones instead of the first ones
}
