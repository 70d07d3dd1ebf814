package buffer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/rollout-rl/rollout/libs/sqldb"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// ReasonDiskFull is why nothing is ingested: the disk of the segments has no more than its reserve left.
const ReasonDiskFull = "DISK_FULL"

const (
	mostReserve   = 1 << 30
	reserveShare  = 10 // of the disk: a tenth
	spaceEvery    = 500 * time.Millisecond
	spaceInFull   = 5 // in quarters of the reserve: so much must be free again before ingest goes on
	reserveInFull = 4
)

// space keeps a reserve of the disk free. Ingest stops before a write fails, as on that disk are also, as a rule, the streams and the
// databases: a NATS server and a learner that meet a full disk do not go on by themselves. What is left lets work in hand come to
// its end.
type space struct {
	dir     string
	reserve uint64 // bytes; 0: a tenth of the disk, at most 1 GiB

	mu  sync.Mutex
	why string // what is missing; "" while there is room
}

// lack says what is missing on the disk, "" where nothing is. full: a write has failed for want of space.
func (s *space) lack(full bool) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	free, size, err := disk(s.dir)
	if err != nil { // a folder that is not there yet; whoever writes there says what is wrong
		free, size = 1<<62, 1<<62
	}
	reserve := s.reserve
	if reserve == 0 {
		reserve = min(mostReserve, size/reserveShare)
	}
	wanted := reserve
	if s.why != "" {
		wanted = reserve / reserveInFull * spaceInFull
	}
	if s.why = ""; full || free < wanted {
		s.why = fmt.Sprintf("%s has %d MiB free, %d MiB are kept in reserve; free some there, and the run goes on by itself", s.dir, free>>20, reserve>>20)
	}
	return s.why
}

// disk is the free bytes and the size of the file system of a folder.
func disk(dir string) (free, size uint64, err error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return 0, 0, fmt.Errorf("space of %s: %w", dir, err)
	}
	return st.Bavail * uint64(st.Bsize), st.Blocks * uint64(st.Bsize), nil
}

// room waits until there is space for an ingest; meanwhile the ledger's state says what is missing. full: the last one failed for
// want of space, and is tried again after a moment whatever the disk says.
func (f *feed) room(ctx context.Context, full bool) {
	for f.lacks(ctx, full) != "" && ctx.Err() == nil {
		pause(ctx, spaceEvery)
		if full {
			return // what is tried now tells whether it still stalls
		}
	}
}

// lacks is what is missing on the disk, "" where nothing is. Who waits for the ledger is told when that changes.
func (f *feed) lacks(ctx context.Context, full bool) string {
	h := f.service.hub(f.run)
	why := f.service.space.lack(full)
	switch {
	case why != "" && h.stall(ReasonDiskFull, why):
		f.log.WarnContext(ctx, "ingest stands still: the disk is full", "why", why)
		f.event(eventv1.Level_LEVEL_ERROR, ReasonDiskFull, "no samples are taken: "+why)
	case why == "" && h.stall("", ""):
		f.log.InfoContext(ctx, "ingest goes on: the disk has space again")
		f.event(eventv1.Level_LEVEL_INFO, "DISK_SPACE", "the disk has space again; ingest goes on")
	}
	return why
}

// outOfSpace reports whether a write failed for want of space.
func outOfSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, sqldb.ErrFull)
}
