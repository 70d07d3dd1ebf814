package ingest

import (
	"context"
	"log/slog"
	"time"

	"github.com/rollout-rl/rollout/libs/disk"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/wait"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

const checkEvery = 500 * time.Millisecond

// space stops the ingest of one run while the disk is full, and publishes why. Safe for concurrent
// use.
type space struct {
	reserve  *disk.Reserve
	state    State
	reporter *Reporter
	log      *slog.Logger
}

// watch checks the disk until ctx ends: also while no samples arrive, because a full disk may be
// why.
func (s *space) watch(ctx context.Context) {
	for ctx.Err() == nil {
		s.check(ctx, false)
		pause(ctx, checkEvery)
	}
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
	missing := s.reserve.Missing(0, "", failed)
	switch {
	case missing != "" && s.state.SetStalled(wait.ForDisk(missing)):
		s.log.WarnContext(ctx, "ingest is paused: the disk is full", "reason", missing)
		s.reporter.Event(eventv1.Level_LEVEL_ERROR, rpcerr.ReasonDiskFull, "no samples are accepted: "+missing)
	case missing == "" && s.state.SetStalled(nil):
		s.log.InfoContext(ctx, "ingest continues: the disk has space again")
		s.reporter.Event(eventv1.Level_LEVEL_INFO, "DISK_SPACE", "the disk has space again; ingest continues")
	}
	return missing
}
