package apikey

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
)

const (
	// pollEvery is how often a process reads the keys: a revoked key works at most for so long.
	pollEvery = time.Second
	// pollPause is the shortest time between two reads, however many unknown keys are sent.
	pollPause = 100 * time.Millisecond
	// maxAge is how long keys are accepted that could not be read again. It lasts longer than a
	// restart of the gateway.
	maxAge = 30 * time.Second
	// findTimeout is how long a call waits for the keys, and readTimeout how long one read may take.
	findTimeout = 3 * time.Second
	readTimeout = 2 * time.Second
	// reportEvery is how often the use of a key is reported.
	reportEvery = time.Minute
)

// Source returns the keys if they have changed since a revision, and records which were used.
type Source func(ctx context.Context, req *keyv1.SyncApiKeysRequest) (*keyv1.SyncApiKeysResponse, error)

// Ring is the keys of a control plane as a process checks them. It needs Run. Its methods may be
// called from many goroutines.
type Ring struct {
	source Source
	log    *slog.Logger
	wake   chan struct{} // requests a read

	mu       sync.Mutex
	byHash   map[string]*Record
	revision int64
	read     time.Time // when the last successful read began
	begun    int       // number of reads that have begun
	ended    int       // of the last one that has ended
	failure  error     // of that one
	changed  chan struct{}
	used     map[string]time.Time // by hash, since the last report
	reported map[string]time.Time // by hash, when its use was last reported
}

// NewRing makes a ring without keys. log nil discards.
func NewRing(source Source, log *slog.Logger) *Ring {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Ring{
		source: source, log: log, wake: make(chan struct{}, 1), changed: make(chan struct{}),
		byHash: map[string]*Record{}, used: map[string]time.Time{}, reported: map[string]time.Time{},
	}
}

// Run reads the keys every second, and sooner for a key that is unknown, until ctx ends.
func (r *Ring) Run(ctx context.Context) error {
	for {
		r.sync(ctx)
		if !wait(ctx, pollPause, nil) || !wait(ctx, pollEvery-pollPause, r.wake) {
			return nil
		}
	}
}

// wait returns after a duration, or when wake receives; false if ctx has ended.
func wait(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-wake:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// sync reads the keys once and reports which were used.
func (r *Ring) sync(ctx context.Context) {
	began := time.Now()
	r.mu.Lock()
	r.begun++
	number := r.begun
	req := &keyv1.SyncApiKeysRequest{Revision: r.revision}
	for hash, at := range r.used {
		if at.Sub(r.reported[hash]) >= reportEvery {
			req.Used = append(req.Used, &keyv1.ApiKeyUse{Sha256: hash, Time: timestamppb.New(at.UTC())})
		}
	}
	r.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	got, err := r.source(limited, req)
	r.mu.Lock()
	defer r.mu.Unlock()
	if ctx.Err() == nil && err != nil && r.failure == nil {
		r.log.WarnContext(ctx, "the API keys can't be read; the known ones are accepted for a while", "for", maxAge, "error", err)
	}
	r.ended, r.failure = number, err
	close(r.changed)
	r.changed = make(chan struct{})
	if err != nil {
		return
	}
	r.read = began
	for _, use := range req.GetUsed() {
		r.reported[use.GetSha256()] = use.GetTime().AsTime()
		delete(r.used, use.GetSha256())
	}
	if got.GetRevision() == r.revision {
		return
	}
	r.revision = got.GetRevision()
	r.byHash = make(map[string]*Record, len(got.GetKeys()))
	for _, record := range got.GetKeys() {
		r.byHash[record.GetSha256()] = record
	}
	for hash := range r.reported {
		if r.byHash[hash] == nil {
			delete(r.reported, hash)
			delete(r.used, hash)
		}
	}
}

// Find returns the record of a key; nil if there is no such key. A key that is not known yet is
// read first, so a new one works at once. ErrExpired; ErrUnknown if the keys can't be read.
func (r *Ring) Find(ctx context.Context, key string) (*Record, error) {
	if !strings.HasPrefix(key, prefix) {
		return nil, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, findTimeout, ErrUnknown)
	defer cancel()
	hash, since := Hash(key), -1
	for {
		found, ended, known, changed, failure := r.look(hash, &since)
		if found != nil && known {
			return found, r.checkExpiry(found)
		}
		if ended && failure == nil {
			return nil, nil
		}
		select {
		case r.wake <- struct{}{}:
		default: // requested already
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if failure != nil {
				return nil, ErrUnknown.Wrap(failure)
			}
			return nil, context.Cause(ctx)
		}
	}
}

// look returns the record of a hash, and notes its use. since is the number of reads that had begun
// at the first call, -1 before it. ended: whether a later one has ended. known: whether the keys
// are new enough. changed is closed when the next read ends.
func (r *Ring) look(hash string, since *int) (found *Record, ended, known bool, changed <-chan struct{}, failure error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if *since < 0 {
		*since = r.begun
	}
	now := time.Now()
	found, known = r.byHash[hash], now.Sub(r.read) < maxAge
	if found != nil && known {
		r.used[hash] = now
	}
	return found, r.ended > *since, known, r.changed, r.failure
}

func (r *Ring) checkExpiry(found *Record) error {
	if found.GetExpires() == nil || found.GetExpires().AsTime().After(time.Now()) {
		return nil
	}
	return ErrExpired.WithMessage("the API key %s expired at %s", found.GetName(), found.GetExpires().AsTime().Format(time.RFC3339)).
		Fix("ask for a new key (`rollout keys create`)")
}
