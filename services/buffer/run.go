package buffer

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	"github.com/rollout-rl/rollout/services/buffer/ingest"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
)

// run is the ledger of one run within this process: its transactions, its newest state, and its
// ingest. It implements ingest.Ledger. Safe for concurrent use.
type run struct {
	id       string
	store    ledger.Store
	state    *liveState
	reporter *ingest.Reporter
	origins  *ingest.Origins
	open     func(ctx context.Context, r *run) (*ingest.Ingester, error)
	seed     func(ctx context.Context, r *run, config *bufferv1.LedgerConfig) error
	active   *atomic.Int64 // runs that ingest

	mu       sync.Mutex // held while the ingest starts or stops; of this run alone
	ingester *ingest.Ingester
	end      func(cause error) // stops ingester and waits for its end
	left     bool              // the service is shutting down
	users    int               // calls that use it; the lock of runs protects it
}

// View runs fn on a consistent snapshot of the ledger.
func (r *run) View(ctx context.Context, fn func(ledger.Reader) error) error {
	return r.store.View(ctx, r.id, fn)
}

// Update runs fn in a transaction and publishes the new state.
func (r *run) Update(ctx context.Context, fn func(ledger.Tx) error) error {
	var state *bufferv1.LedgerState
	var revision uint64
	err := r.store.Update(ctx, r.id, func(tx ledger.Tx) (err error) {
		if err = fn(tx); err != nil {
			return err
		}
		revision = tx.Ledger().Revision
		state, err = ledger.StateMessage(ctx, tx)
		return err
	})
	if err == nil {
		r.state.publish(revision, state)
		return nil
	}
	if _, domain := rpcerr.From(err); !domain && ctx.Err() == nil {
		r.state.invalidate() // a commit that failed may have happened
	}
	return err
}

// current is the newest state, and the channel that is closed when there is another.
func (r *run) current(ctx context.Context) (*bufferv1.LedgerState, <-chan struct{}, error) {
	if state, changed := r.state.newest(); state != nil {
		return state, changed, nil
	}
	var state *bufferv1.LedgerState
	var revision uint64
	err := r.View(ctx, func(reader ledger.Reader) (err error) {
		revision = reader.Ledger().Revision
		state, err = ledger.StateMessage(ctx, reader)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	r.state.publish(revision, state)
	newest, changed := r.state.newest()
	if newest == nil { // it was invalidated again
		newest = state
	}
	return newest, changed, nil
}

// create creates or reopens the ledger and starts its ingest. ledger.ErrConfig, fence.ErrFenced.
func (r *run) create(ctx context.Context, config *bufferv1.LedgerConfig, by *fencev1.Fence) (*bufferv1.LedgerState, error) {
	if err := r.store.Create(ctx, r.id, config, by); err != nil {
		return nil, err
	}
	crashpoint.Here("buffer/created") // the ledger exists, ingest does not run
	if config.GetSeed() != nil {
		if err := r.begin(ctx, config); err != nil {
			return nil, err
		}
	}
	err := r.Update(ctx, func(tx ledger.Tx) error {
		l := tx.Ledger()
		if !proto.Equal(l.Config, config) {
			return ledger.ErrConfig.With("run", r.id)
		}
		l.Closed = false
		return tx.Admit(ctx, by)
	})
	if err != nil {
		return nil, err
	}
	if _, err := r.ingest(ctx); err != nil && !errors.Is(err, ErrLeaving) {
		return nil, err
	}
	state, _, err := r.current(ctx)
	return state, err
}

// begin fills the ledger of a run that begins with the groups of a snapshot.
func (r *run) begin(ctx context.Context, config *bufferv1.LedgerConfig) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.seed(ctx, r, config)
}

// close closes the ledger and stops its ingest. When it returns nothing more is appended.
// fence.ErrFenced.
func (r *run) close(ctx context.Context, by *fencev1.Fence) error {
	err := r.Update(ctx, func(tx ledger.Tx) error {
		tx.Ledger().Closed = true
		return tx.Admit(ctx, by)
	})
	if err != nil {
		return err
	}
	r.stop(ledger.ErrClosed.With("run", r.id), false)
	return nil
}

// ingest is the ingester of the run, which is started if the ledger is open. ledger.ErrNoLedger,
// ledger.ErrClosed, ErrLeaving.
func (r *run) ingest(ctx context.Context) (*ingest.Ingester, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.left:
		return nil, ErrLeaving
	case r.ingester != nil:
		return r.ingester, nil
	}
	closed := false
	err := r.View(ctx, func(reader ledger.Reader) error {
		closed = reader.Ledger().Closed
		return nil
	})
	if err != nil {
		return nil, err
	}
	if closed {
		return nil, ledger.ErrClosed.With("run", r.id)
	}
	ingester, err := r.open(ctx, r)
	if err != nil {
		return nil, err
	}
	life, cancel := context.WithCancelCause(context.WithoutCancel(ctx)) // ends with stop, not with the call
	ended := make(chan struct{})
	r.active.Add(1)
	go func() {
		defer close(ended)
		defer r.active.Add(-1)
		ingester.Run(life)
	}()
	r.ingester = ingester
	r.end = func(cause error) {
		cancel(cause)
		<-ended
	}
	return ingester, nil
}

// stop stops the ingest. Later puts get cause. forever: it is never started again.
func (r *run) stop(cause error, forever bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left = r.left || forever
	if r.ingester != nil {
		r.end(cause)
		r.ingester = nil
	}
}
