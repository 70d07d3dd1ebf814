package buffer

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// plain characters make a run id, which is part of a subject and the name of a folder.
const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"

// Service is the buffer's use cases. Its methods may be called from many goroutines.
type Service struct {
	cfg  Config
	deps Deps

	life context.Context // of ingest; ends with Run
	end  context.CancelFunc

	mu    sync.Mutex
	hubs  map[string]*hub
	feeds map[string]*feed

	gate  *gate
	space *space
	sync  func(*os.File) error // of segments; nil: the system's own way
}

// passes is how many ingests go on at a time: while one waits for the disk another writes its rows.
const passes = 2

func newService(cfg Config, deps Deps) (*Service, error) {
	if err := cfg.complete(&deps); err != nil {
		return nil, err
	}
	life, end := context.WithCancel(context.Background())
	return &Service{
		cfg: cfg, deps: deps, life: life, end: end, hubs: map[string]*hub{}, feeds: map[string]*feed{},
		gate: newGate(passes), space: &space{dir: cfg.Segments, reserve: cfg.ReserveBytes},
	}, nil
}

// run resumes the ingest of every open ledger and stops all ingest when ctx ends.
func (s *Service) run(ctx context.Context) error {
	defer s.stop()
	if err := s.resume(ctx); err != nil && ctx.Err() == nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func (s *Service) resume(ctx context.Context) error {
	runs, err := s.deps.Store.Runs(ctx)
	if err != nil {
		return err
	}
	for _, run := range runs {
		if err := s.ingest(run); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) stop() {
	s.end()
	s.mu.Lock()
	feeds := s.feeds
	s.feeds = map[string]*feed{}
	s.mu.Unlock()
	for _, f := range feeds {
		f.stop()
	}
}

// folder of a run's segments.
func (s *Service) folder(run string) string { return filepath.Join(s.cfg.Segments, run) }

// share is how much of its stream a run may hold in memory, bytes.
func (s *Service) share() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cfg.FetchBytes / uint64(max(1, len(s.feeds)))
}

// vault is the sealed segments of a run; nil where segments are local.
func (s *Service) vault(run string) *vault {
	if s.deps.Blobs == nil {
		return nil
	}
	return &vault{blobs: s.deps.Blobs, run: run, dir: s.folder(run)}
}

func (s *Service) hub(run string) *hub {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hubs[run] == nil {
		s.hubs[run] = newHub()
	}
	return s.hubs[run]
}

// update runs fn in a transaction and shows the new state to those who wait for it.
func (s *Service) update(ctx context.Context, run string, fn func(Tx) error) error {
	var state *bufferv1.LedgerState
	var revision uint64
	h := s.hub(run) // not within: who opens a ledger waits for transactions under the service's lock
	err := s.deps.Store.Update(ctx, run, func(tx Tx) (err error) {
		if err = fn(tx); err != nil {
			return err
		}
		revision = tx.Ledger().Revision
		state, err = tell(ctx, tx)
		return err
	})
	if _, domain := rpcerr.From(err); err != nil && !domain && ctx.Err() == nil {
		h.forget() // a failed commit may have happened
	}
	if err != nil {
		return err
	}
	h.publish(revision, state)
	return nil
}

// state is the newest state, and the channel that closes when there is another.
func (s *Service) state(ctx context.Context, run string) (*bufferv1.LedgerState, <-chan struct{}, error) {
	if state, changed := s.peek(run); state != nil {
		return state, changed, nil
	}
	var state *bufferv1.LedgerState
	var revision uint64
	err := s.deps.Store.View(ctx, run, func(r Reader) (err error) {
		revision = r.Ledger().Revision
		state, err = tell(ctx, r)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	h := s.hub(run)
	h.publish(revision, state)
	state, changed := h.now()
	return state, changed, nil
}

func (s *Service) peek(run string) (*bufferv1.LedgerState, <-chan struct{}) {
	s.mu.Lock()
	h := s.hubs[run]
	s.mu.Unlock()
	if h == nil {
		return nil, nil
	}
	return h.now()
}

// open makes or reopens the ledger of a run and starts its ingest. ErrConfig, ErrStale.
func (s *Service) open(ctx context.Context, run string, config *bufferv1.LedgerConfig, incarnation uint32) (*bufferv1.LedgerState, error) {
	if strings.Trim(run, plain) != "" {
		return nil, ErrRun.With("run", run)
	}
	if err := s.deps.Store.Create(ctx, run, config); err != nil {
		return nil, err
	}
	crashpoint.Here("buffer/created") // the ledger is there, ingest does not run
	err := s.update(ctx, run, func(tx Tx) error {
		l := tx.Ledger()
		if !proto.Equal(l.Config, config) {
			return ErrConfig.With("run", run)
		}
		if err := l.admit(incarnation); err != nil {
			return err
		}
		l.Closed, l.Incarnation = false, max(l.Incarnation, incarnation)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if err := s.ingest(run); err != nil {
		return nil, err
	}
	state, _, err := s.state(ctx, run)
	return state, err
}

// close stops the ingest of a run. When it returns nothing more is appended. ErrStale.
func (s *Service) close(ctx context.Context, run string, incarnation uint32) error {
	err := s.update(ctx, run, func(tx Tx) error {
		if err := tx.Ledger().admit(incarnation); err != nil {
			return err
		}
		tx.Ledger().Closed = true
		return nil
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	f := s.feeds[run]
	delete(s.feeds, run)
	s.mu.Unlock()
	if f != nil {
		f.stop()
	}
	return nil
}
