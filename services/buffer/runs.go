package buffer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rollout-rl/rollout/libs/disk"
	"github.com/rollout-rl/rollout/libs/telemetry"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	"github.com/rollout-rl/rollout/services/buffer/ingest"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

const (
	// runIDLetters are the characters of a run id, which is part of a subject and the name of a
	// folder.
	runIDLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
	// parallelCommits is how many groups are committed at a time: while one waits for the disk
	// another writes its rows.
	parallelCommits = 2

	resumeFirst = 100 * time.Millisecond
	resumeLast  = 10 * time.Second
)

// runs are the ledgers that are ingested into or used by a call. Its lock is never held during I/O.
// Safe for concurrent use.
type runs struct {
	cfg     Config
	deps    Deps
	queue   *ingest.FairQueue
	reserve *disk.Reserve
	active  atomic.Int64    // runs that ingest
	life    context.Context // ends when the service shuts down
	end     context.CancelFunc

	mu   sync.Mutex
	byID map[string]*run
}

func newRuns(cfg Config, deps Deps) *runs {
	life, end := context.WithCancel(context.Background())
	return &runs{
		cfg: cfg, deps: deps, queue: ingest.NewFairQueue(parallelCommits), reserve: disk.NewReserve(cfg.Segments, cfg.ReserveBytes),
		life: life, end: end, byID: map[string]*run{},
	}
}

// use is the run with an id, until done is called. Its ledger need not exist. ErrRun.
func (rs *runs) use(id string) (_ *run, done func(), err error) {
	if strings.Trim(id, runIDLetters) != "" {
		return nil, nil, ErrRun.With("run", id)
	}
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r := rs.byID[id]
	if r == nil {
		log := rs.deps.Log.With(telemetry.AttrRun, id, telemetry.AttrEvent, false)
		r = &run{id: id, store: rs.deps.Store, state: newLiveState(), reporter: ingest.NewReporter(id, rs.deps.Events, log), origins: ingest.NewOrigins(), open: rs.openIngest, seed: rs.seed,
			active: &rs.active, left: rs.life.Err() != nil}
		rs.byID[id] = r
	}
	r.users++
	return r, func() { rs.leave(r) }, nil
}

// leave ends a use, and releases the memory of a run that no one uses and that nothing is ingested
// into.
func (rs *runs) leave(r *run) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if r.users--; r.users > 0 || !r.mu.TryLock() { // the service is shutting down
		return
	}
	defer r.mu.Unlock()
	if r.ingester == nil {
		delete(rs.byID, r.id)
	}
}

// openIngest makes the ingester of a run.
func (rs *runs) openIngest(ctx context.Context, r *run) (*ingest.Ingester, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(rs.life, cancel)()
	folder := rs.cfg.folder(r.id)
	cfg := ingest.Config{
		Run: r.id, Budget: rs.budget,
		Segments: segment.Config{Dir: folder, RollBytes: rs.cfg.SegmentBytes, Volatile: rs.cfg.Durability == Process, Datasync: rs.deps.Datasync},
	}
	return ingest.Open(ctx, cfg, ingest.Deps{
		Ledger: r, State: r.state, Source: rs.deps.Bus, Bucket: segment.NewBucket(rs.deps.Blobs, r.id, folder), Queue: rs.queue,
		Reserve: rs.reserve, Reporter: r.reporter, Origins: r.origins, Log: rs.deps.Log.With(telemetry.AttrRun, r.id, telemetry.AttrEvent, false),
	})
}

// budget is how many bytes of arriving payloads each run may hold in memory.
func (rs *runs) budget() uint64 { return rs.cfg.FetchBytes / uint64(max(1, rs.active.Load())) }

// serve resumes the ingest of open ledgers, and stops all ingest when ctx ends.
func (rs *runs) serve(ctx context.Context) error {
	defer rs.stop()
	open, err := rs.deps.Store.Runs(ctx)
	if err != nil && ctx.Err() == nil {
		return err
	}
	var wait sync.WaitGroup
	defer wait.Wait()
	for _, id := range open {
		if r, done, err := rs.use(id); err == nil {
			wait.Go(func() {
				defer done()
				rs.resume(ctx, r)
			})
		}
	}
	<-ctx.Done()
	return nil
}

// resume starts the ingest of a run, and retries until it succeeds, the ledger is closed, or ctx
// ends.
func (rs *runs) resume(ctx context.Context, r *run) {
	delay := resumeFirst
	for reported := false; ; reported = true {
		_, err := r.ingest(ctx)
		if err == nil || ctx.Err() != nil || errors.Is(err, ledger.ErrClosed) || errors.Is(err, ledger.ErrNoLedger) || errors.Is(err, ErrLeaving) {
			return
		}
		if !reported {
			message := fmt.Sprintf("the ledger of %s cannot be opened, which is retried; other runs continue: %v", r.id, err)
			r.reporter.Event(eventv1.Level_LEVEL_ERROR, "LEDGER_UNAVAILABLE", message)
			rs.deps.Log.ErrorContext(ctx, message, telemetry.AttrRun, r.id, telemetry.AttrEvent, false)
		}
		timer := time.NewTimer(delay)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
		delay = min(2*delay, resumeLast)
	}
}

// stop ends the ingest of all runs. No ingest starts after it.
func (rs *runs) stop() {
	rs.end()
	rs.mu.Lock()
	all := slices.Collect(maps.Values(rs.byID))
	rs.mu.Unlock()
	var wait sync.WaitGroup
	for _, r := range all {
		wait.Go(func() { r.stop(ErrLeaving, true) })
	}
	wait.Wait()
}
