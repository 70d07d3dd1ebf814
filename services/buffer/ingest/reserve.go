package ingest

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"syscall"
	"time"

	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

const (
	largestReserve = 1 << 30
	reserveShare   = 10 // of the disk: a tenth
	checkEvery     = 500 * time.Millisecond
	// After the reserve was reached, ingest continues when resumeShare/fullShare of it are free.
	resumeShare = 5
	fullShare   = 4
)

// Reserve keeps a part of the disk free. Ingest stops before a write fails, because streams and
// databases are usually on the same disk, and NATS servers and learners do not recover from a full
// disk by themselves. The reserve lets work in progress finish. Safe for concurrent use.
type Reserve struct {
	dir   string
	bytes uint64 // 0: a tenth of the disk, at most 1 GiB

	mu      sync.Mutex
	missing string // what is missing; "" while there is space
}

// NewReserve keeps bytes free on the disk of dir; 0: a tenth of the disk, at most 1 GiB.
func NewReserve(dir string, bytes uint64) *Reserve { return &Reserve{dir: dir, bytes: bytes} }

// Missing describes what is missing on the disk, "" if nothing is. failed: a write has failed for
// lack of space.
func (r *Reserve) Missing(failed bool) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	free, size, err := diskSpace(r.dir)
	if err != nil { // the folder does not exist yet; a write to it reports the error
		free, size = 1<<62, 1<<62
	}
	reserve := r.bytes
	if reserve == 0 {
		reserve = min(largestReserve, size/reserveShare)
	}
	wanted := reserve
	if r.missing != "" {
		wanted = reserve / fullShare * resumeShare
	}
	if r.missing = ""; failed || free < wanted {
		r.missing = fmt.Sprintf("%s has %d MiB free and keeps %d MiB in reserve; free some space and the run continues", r.dir, free>>20, reserve>>20)
	}
	return r.missing
}

// diskSpace is the free bytes and the size of the file system of a folder.
func diskSpace(dir string) (free, size uint64, err error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return 0, 0, fmt.Errorf("space of %s: %w", dir, err)
	}
	return st.Bavail * uint64(st.Bsize), st.Blocks * uint64(st.Bsize), nil
}

// space stops the ingest of one run while the disk is full, and publishes why. Safe for concurrent
// use.
type space struct {
	reserve  *Reserve
	state    State
	reporter *Reporter
	log      *slog.Logger
}

// wait returns when there is space. failed: the last write failed for lack of space; it is retried
// after a moment, whatever the free space is.
func (s *space) wait(ctx context.Context, failed bool) {
	for s.check(ctx, failed) != "" && ctx.Err() == nil {
		pause(ctx, checkEvery)
		if failed {
			return
		}
	}
}

// check describes what is missing on the disk, "" if nothing is, and publishes it if that changed.
func (s *space) check(ctx context.Context, failed bool) string {
	missing := s.reserve.Missing(failed)
	switch {
	case missing != "" && s.state.SetStalled(ReasonDiskFull, missing):
		s.log.WarnContext(ctx, "ingest is paused: the disk is full", "reason", missing)
		s.reporter.Event(eventv1.Level_LEVEL_ERROR, ReasonDiskFull, "no samples are accepted: "+missing)
	case missing == "" && s.state.SetStalled("", ""):
		s.log.InfoContext(ctx, "ingest continues: the disk has space again")
		s.reporter.Event(eventv1.Level_LEVEL_INFO, "DISK_SPACE", "the disk has space again; ingest continues")
	}
	return missing
}
