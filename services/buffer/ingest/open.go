package ingest

import (
	"context"
	"fmt"

	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// openSegments deletes files that the ledger does not count on and reports durable bytes that are
// missing.
func openSegments(ctx context.Context, cfg Config, deps Deps) (*segment.Writer, error) {
	var segments []ledger.Segment
	err := deps.Ledger.View(ctx, func(r ledger.Reader) (err error) {
		segments, err = r.Segments(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	var known []segment.Tail
	newest := uint32(0)
	for _, g := range segments {
		newest = g.Number
		if !g.Trimmed {
			known = append(known, segment.Tail{Segment: g.Number, Bytes: g.Bytes})
		} else if _, err := segment.Remove(cfg.Segments.Dir, g.Number); err != nil { // left by a crash between trim and deletion
			return nil, err
		}
	}
	if deps.Bucket != nil {
		uploaded, err := deps.Bucket.Newest(ctx)
		if err != nil {
			return nil, err
		}
		files := cfg.Segments
		files.Volatile = true // durable data is in the bucket
		writer, repair, err := segment.OpenCache(files, known, max(newest, uploaded))
		report(ctx, cfg, deps, repair)
		return writer, err
	}
	writer, repair, err := segment.Open(cfg.Segments, known, newest)
	report(ctx, cfg, deps, repair)
	return writer, err
}

func report(ctx context.Context, cfg Config, deps Deps, repair segment.Repair) {
	if repair.Cut > 0 {
		deps.Log.InfoContext(ctx, "deleted segments that the ledger does not name; their samples are delivered again", "bytes", repair.Cut)
	}
	for _, short := range repair.Short {
		deps.Reporter.Event(eventv1.Level_LEVEL_ERROR, "PAYLOAD_LOST",
			fmt.Sprintf("segment %d of %s lacks %d bytes that were durable: the disk lost them; start from a snapshot", short.Segment, cfg.Run, short.Bytes))
	}
}
