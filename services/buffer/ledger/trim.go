package ledger

import "context"

// Trimmed is what a trim leaves to do with files.
type Trimmed struct {
	Segments []Segment // all segments of the ledger; empty if nothing was trimmed
	Deleted  []uint32  // those whose files can be deleted now
}

// Trim marks the segments that only the steps up to one need as trimmed, and their payloads in the
// storage service as unused. The last segment may still be written to and is kept. The caller
// deletes the files afterwards.
func Trim(ctx context.Context, tx Tx, through uint64) (Trimmed, error) {
	l := tx.Ledger()
	through = min(through, l.Step)
	if through <= l.Trimmed {
		return Trimmed{}, nil
	}
	if err := tx.MarkTrimmed(ctx, l.Trimmed, through); err != nil {
		return Trimmed{}, err
	}
	l.Trimmed = through
	segments, err := tx.Segments(ctx)
	if err != nil || len(segments) == 0 {
		return Trimmed{}, err
	}
	t := Trimmed{Segments: segments}
	var candidates []*Segment
	for i := range segments[:len(segments)-1] {
		if g := &segments[i]; !g.Trimmed {
			candidates = append(candidates, g)
		}
	}
	if len(candidates) == 0 { // Uncovered reads every sample that no step has consumed
		return t, nil
	}
	needed, err := tx.Uncovered(ctx, through)
	if err != nil {
		return Trimmed{}, err
	}
	for _, g := range candidates {
		if needed[g.Number] {
			continue
		}
		g.Trimmed = true
		if err := tx.PutSegment(ctx, *g); err != nil {
			return Trimmed{}, err
		}
		t.Deleted = append(t.Deleted, g.Number)
	}
	return t, nil
}
