package scheduler

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/atomicfile"
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/telemetry"
)

// renewEvery is the interval at which the clock is compared with the ends of credentials. It is
// short because the clock may jump: a timer for the next renewal would expire too late.
const renewEvery = time.Second

// renewal writes the credentials of the workers of a run, each into the file workers/<id>.token,
// and renews them at half of their lifetime.
type renewal struct {
	*scope
	make func(credential.Claims) string

	mu      sync.Mutex
	workers map[string]*issued
}

// issued is the newest credential of a worker.
type issued struct {
	role    string
	claims  credential.Claims
	text    []byte // of the file; nil: another scheduler has written it
	failing bool
}

func newRenewal(s *scope, issue func(credential.Claims) string) *renewal {
	return &renewal{scope: s, make: issue, workers: map[string]*issued{}}
}

// issue writes the credential of a worker that is about to start, and returns its file.
func (r *renewal) issue(worker, role string) (file string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := &issued{role: role}
	r.workers[worker] = w
	return r.file(worker), r.write(worker, w)
}

// follow renews the credential of a worker that another scheduler has started.
func (r *renewal) follow(worker, role string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.workers[worker] = &issued{role: role}
}

func (r *renewal) file(worker string) string {
	return filepath.Join(r.board.record().GetDirectory(), "workers", worker+".token")
}

func (r *renewal) write(worker string, w *issued) error {
	claims := credential.For(r.scope.run, w.role, r.incarnation, r.Now())
	text := []byte(r.make(claims) + "\n")
	if err := atomicfile.Write(r.file(worker), text, 0o600); err != nil {
		return err
	}
	w.claims, w.text = claims, text
	return nil
}

// run renews until ctx ends. A credential that cannot be written is tried again: the present one
// stays in force for half of its lifetime.
func (r *renewal) run(ctx context.Context) error {
	ticker := time.NewTicker(renewEvery)
	defer ticker.Stop()
	for {
		r.renew(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// renew writes what is due, and what another process has overwritten: a former scheduler that was
// suspended may continue with an old credential.
func (r *renewal) renew(ctx context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for worker, w := range r.workers {
		if w.text != nil && !w.claims.Due(r.Now()) {
			if text, err := os.ReadFile(r.file(worker)); err == nil && bytes.Equal(text, w.text) {
				continue
			}
		}
		err := r.write(worker, w)
		if err != nil && !w.failing {
			r.Log.WarnContext(ctx, "the credential of a worker could not be renewed, which is tried again", telemetry.AttrRun, r.scope.run, "worker", worker, "error", err)
		}
		w.failing = err != nil
	}
}
