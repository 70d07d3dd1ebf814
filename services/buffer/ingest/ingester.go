// Package ingest writes the trajectories of a run into its ledger, from the run's stream and from
// puts.
//
// Requests are committed in groups: the payloads of all waiting requests are appended to a segment,
// the segment is synced while the statements of one transaction run, the transaction is committed,
// and then every request is answered. Requests that arrive during a commit wait for the next group,
// so the groups grow with the load and no timer is needed.
package ingest

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/disk"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// Ledger reads and writes the ledger of one run. ledger.ErrNoLedger.
type Ledger interface {
	View(ctx context.Context, fn func(ledger.Reader) error) error
	Update(ctx context.Context, fn func(ledger.Tx) error) error
}

// State publishes facts about the ingest with the state of the ledger.
type State interface {
	// SetStalled records why nothing is ingested, nil if it is. It reports whether that changed.
	SetStalled(stall *waitv1.Wait) bool
	// BeginIngest and EndIngest frame each transaction of samples, and record whether it failed.
	BeginIngest()
	EndIngest(err error)
	// CountSamples adds payloads to the average size of a sample.
	CountSamples(samples int, bytes uint64)
}

// Source is where the trajectories of runs come from; *bus.Bus is one.
type Source interface {
	Trajectories(ctx context.Context, run string) (*bus.Consumer, error)
}

// Config is how the trajectories of a run are ingested.
type Config struct {
	Run      string
	Segments segment.Config
	Budget   func() uint64 // payload bytes that the run may hold in memory now
}

// Deps are the collaborators of an Ingester. Queue and Reserve are shared by all runs.
type Deps struct {
	Ledger   Ledger
	State    State
	Source   Source          // nil: only puts are ingested
	Bucket   *segment.Bucket // where payloads are durable; nil: on the local disk
	Queue    *FairQueue
	Reserve  *disk.Reserve
	Reporter *Reporter
	Origins  *Origins
	Log      *slog.Logger
}

// Ingester ingests the trajectories of one run. Safe for concurrent use.
type Ingester struct {
	run       string
	budget    func() uint64
	committer *committer
	stream    *stream // nil: no source
	space     *space
	reporter  *Reporter
	requests  chan *request
	done      chan struct{}
	cause     error // why it ended; written before done is closed
}

// request is what is ingested, or fails, as a unit: the deliveries of one fetch, or the puts of one
// call.
type request struct {
	puts      [][]ledger.Arrival
	payloads  [][][]byte     // of each arrival; nil: none to append
	malformed int            // messages that could not be parsed
	bytes     uint64         // of the payloads
	tallies   []ledger.Tally // of each put, after the commit
	done      chan error     // receives one value
}

// waiting is the largest number of requests that wait for the next group.
const waiting = 256

// Open prepares the segments of a run for writing. Nothing is ingested before Run.
func Open(ctx context.Context, cfg Config, deps Deps) (*Ingester, error) {
	writer, err := openSegments(ctx, cfg, deps)
	if err != nil {
		return nil, fmt.Errorf("open the segments of %s: %w", cfg.Run, err)
	}
	i := &Ingester{
		run: cfg.Run, budget: cfg.Budget, reporter: deps.Reporter, requests: make(chan *request, waiting), done: make(chan struct{}),
		space: &space{reserve: deps.Reserve, state: deps.State, reporter: deps.Reporter, log: deps.Log},
		committer: &committer{run: cfg.Run, ledger: deps.Ledger, state: deps.State, queue: deps.Queue, bucket: deps.Bucket, reporter: deps.Reporter,
			writer: writer, recorded: writer.Tail()},
	}
	if deps.Source != nil {
		i.stream = &stream{run: cfg.Run, source: deps.Source, ingest: i.ingest, budget: cfg.Budget, space: i.space, reporter: deps.Reporter, origins: deps.Origins, log: deps.Log}
	}
	return i, nil
}

// Run ingests until ctx ends; its cause is what later puts are answered with.
func (i *Ingester) Run(ctx context.Context) {
	var others sync.WaitGroup
	others.Go(func() { i.space.watch(ctx) })
	if i.stream != nil {
		others.Go(func() { i.stream.consume(ctx) })
	}
	i.commitGroups(ctx)
	others.Wait()
	i.committer.close()
	i.cause = context.Cause(ctx)
	close(i.done)
}

// Put ingests some puts and returns a tally for each. They are durable when it returns.
// rpcerr.ErrDiskFull, ErrFailed, and the cause that ended Run.
func (i *Ingester) Put(ctx context.Context, puts []*trajectoryv1.TrajectoryBatch) ([]ledger.Tally, error) {
	if why := i.space.check(ctx, false); why != "" {
		return nil, diskFull(i.run, why)
	}
	r := newRequest()
	for _, put := range puts {
		r.add(put.GetTrajectories())
	}
	if len(r.puts) == 0 {
		return nil, nil
	}
	err := i.ingest(ctx, r)
	if outOfSpace(err) {
		return nil, diskFull(i.run, i.space.check(ctx, true))
	}
	if _, domain := rpcerr.From(err); err != nil && !domain && ctx.Err() == nil {
		return nil, ErrFailed.Wrap(err)
	}
	return r.tallies, err
}

// ingest waits until a request is durable, or failed as a whole.
func (i *Ingester) ingest(ctx context.Context, r *request) error {
	select {
	case i.requests <- r:
	case <-i.done:
		return i.cause
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-r.done:
		return err
	case <-i.done:
		select {
		case err := <-r.done: // it was in the last group
			return err
		default:
			return i.cause
		}
	case <-ctx.Done():
		return ctx.Err() // the message may still be ingested
	}
}

// commitGroups commits all waiting requests at once, again and again, until ctx ends.
func (i *Ingester) commitGroups(ctx context.Context) {
	for {
		var group []*request
		select {
		case <-ctx.Done():
			return
		case r := <-i.requests:
			group = append(group, r)
		}
		for size := group[0].bytes; size < i.budget() && len(i.requests) > 0; {
			r := <-i.requests // there is no other receiver
			group, size = append(group, r), size+r.bytes
		}
		i.committer.state.BeginIngest()
		err := i.committer.commit(ctx, group)
		i.committer.state.EndIngest(err)
		if err != nil && ctx.Err() == nil {
			i.reporter.Event(eventv1.Level_LEVEL_ERROR, "INGEST_FAILED", fmt.Sprintf("ingest failed and is retried: %v", err))
		}
		for _, r := range group {
			r.done <- err
		}
	}
}

func newRequest() *request { return &request{done: make(chan error, 1)} }

// add verifies the payloads of a put. The caller does this, concurrently with the commit of other
// requests.
func (r *request) add(envelopes []*trajectoryv1.TrajectoryEnvelope) {
	arrivals, payloads := make([]ledger.Arrival, len(envelopes)), make([][]byte, len(envelopes))
	for i, e := range envelopes {
		a := &arrivals[i]
		*a = ledger.Arrival{Header: e.GetHeader(), Ref: e.GetPayloadRef(), CRC: e.GetCrc32C()}
		switch {
		case !ledger.Trained(e.GetHeader().GetOutcome()) && !e.GetHeader().GetLeftOut():
		case len(e.GetPayload()) > 0 && segment.CRC(e.GetPayload()) != e.GetCrc32C():
			a.Flaw = ledger.ReasonPayloadCorrupt
		case len(e.GetPayload()) > 0:
			a.Ref, payloads[i] = "", e.GetPayload()
			r.bytes += uint64(len(e.GetPayload()))
		case e.GetPayloadRef() == "":
			a.Flaw = ledger.ReasonPayloadMissing
		}
	}
	r.puts, r.payloads = append(r.puts, arrivals), append(r.payloads, payloads)
}
