package buffer

import (
	"context"
	"slices"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// trimmer drops the segments that only old steps need: from the ledger first, and then their files. A crash in between leaves files that
// open removes.
type trimmer struct {
	vault *vault // nil where segments are local
	dir   string
	busy  uint32 // segment that is written to; 0: none
	known []Segment
	due   []uint32 // dropped from the ledger
}

func (s *Service) trimmer(run string) *trimmer {
	t := &trimmer{vault: s.vault(run), dir: s.folder(run)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.feeds[run]; f != nil {
		t.busy = f.busy()
	}
	return t
}

// record drops from the ledger what only the steps through one need.
func (t *trimmer) record(ctx context.Context, tx Tx, through uint64) error {
	t.known, t.due = nil, nil // a transaction may be tried again
	l := tx.Ledger()
	through = min(through, l.Step)
	if through <= l.Trimmed {
		return nil
	}
	l.Trimmed = through
	segments, err := tx.Segments(ctx)
	if err != nil || len(segments) == 0 {
		return err
	}
	t.known = segments
	due := slices.DeleteFunc(slices.Clone(segments[:len(segments)-1]), func(g Segment) bool { // the last one is written to
		return g.Trimmed || g.Number == t.busy
	})
	if len(due) == 0 { // to ask for what is needed reads every sample that is waiting
		return nil
	}
	needed, err := tx.Uncovered(ctx, through)
	if err != nil {
		return err
	}
	for _, g := range due {
		if needed[g.Number] {
			continue
		}
		g.Trimmed = true
		if err := tx.PutSegment(ctx, g); err != nil {
			return err
		}
		t.due = append(t.due, g.Number)
	}
	t.known, err = tx.Segments(ctx)
	return err
}

// remove drops the files of what was recorded, and says how many bytes that freed.
func (t *trimmer) remove(ctx context.Context) (freed uint64, err error) {
	if t.vault != nil {
		if err := t.vault.drop(ctx, t.known); err != nil {
			return 0, err
		}
	}
	for _, number := range t.due {
		crashpoint.Here("buffer/trimmed") // the ledger has dropped the segment, its file is there
		n, err := segment.Remove(t.dir, number)
		if err != nil {
			return freed, err
		}
		freed += n
	}
	return freed, nil
}
