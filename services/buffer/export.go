package buffer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/blob"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// exportPositions is how many positions one message of an export covers.
const exportPositions = 512

// Payloads is where the samples of a run lie.
type Payloads struct {
	Folder   string                                                // of segments
	Blobs    Blobs                                                 // has the segments that the folder lacks; nil: the folder is all there is
	Artifact func(ctx context.Context, ref string) ([]byte, error) // reads a payload of the storage service
}

// Export gives every row of a ledger as it stands at one moment, and what its payloads and segments really hold. Segments that the
// folder lacks, or has damaged, are fetched into it where there are blobs; else it changes nothing. It needs no running service.
// ErrNoLedger, and what send returns.
func Export(ctx context.Context, store Store, run string, from Payloads, send func(*bufferv1.ExportLedgerResponse) error) error {
	e := &export{Payloads: from, store: store, run: run, send: send, files: segment.NewReader(from.Folder), dropped: map[uint32]bool{}}
	return errors.Join(store.View(ctx, run, func(r Reader) error { return e.rows(ctx, r) }), e.files.Close())
}

type export struct {
	Payloads
	store   Store
	run     string
	send    func(*bufferv1.ExportLedgerResponse) error
	files   *segment.Reader
	dropped map[uint32]bool // segments that a snapshot covers
	trimmed uint64          // steps covered by the snapshot that was taken while the export read
}

func (e *export) rows(ctx context.Context, r Reader) error {
	first, err := e.head(ctx, r)
	if err != nil {
		return err
	}
	if err := e.send(first); err != nil {
		return err
	}
	from, to, err := e.span(ctx, r, first.GetSteps())
	if err != nil {
		return err
	}
	for ; from < to; from += exportPositions {
		page, err := e.page(ctx, r, from, min(to, from+exportPositions))
		if err != nil {
			return err
		}
		if err := e.send(page); err != nil {
			return err
		}
	}
	if e.trimmed <= first.GetLedger().GetTrimmed() {
		return nil
	}
	// Payloads went while they were read: the ledger once more, with the snapshot that covers them.
	again := proto.CloneOf(first.GetLedger())
	again.Trimmed = e.trimmed
	return e.send(&bufferv1.ExportLedgerResponse{Ledger: again})
}

// head is the ledger, its segments, weights and steps.
func (e *export) head(ctx context.Context, r Reader) (*bufferv1.ExportLedgerResponse, error) {
	l := r.Ledger()
	state, err := tell(ctx, r)
	if err != nil {
		return nil, err
	}
	out := &bufferv1.ExportLedgerResponse{Ledger: &bufferv1.LedgerRecord{
		Config: l.Config, State: state, Chain: l.Chain, Trimmed: l.Trimmed, Closed: l.Closed, Folder: e.Folder,
	}}
	if abs, err := filepath.Abs(e.Folder); err == nil {
		out.Ledger.Folder = abs
	}
	steps, err := r.Steps(ctx, 0)
	if err != nil {
		return nil, err
	}
	last, newest := l.Step, max(l.Step, l.WeightsVersion)
	for _, s := range steps {
		out.Steps = append(out.Steps, stepRecord(s))
		last, newest = max(last, s.Step), max(newest, s.Step)
	}
	leased, err := r.Step(ctx, last+1)
	if err != nil {
		return nil, err
	}
	if leased != nil {
		out.Steps = append(out.Steps, stepRecord(leased))
	}
	if out.Weights, err = weightsRecords(ctx, r, l.Config.GetFirstStep(), newest+1); err != nil {
		return nil, err
	}
	out.Segments, err = e.segments(ctx, r)
	return out, err
}

func weightsRecords(ctx context.Context, r Reader, from, to uint64) ([]*bufferv1.WeightsRecord, error) {
	var versions []uint64
	for v := from; v <= to; v++ {
		versions = append(versions, v)
	}
	known, err := r.Weights(ctx, versions)
	if err != nil {
		return nil, err
	}
	var out []*bufferv1.WeightsRecord
	for _, v := range versions {
		if digest, ok := known[v]; ok {
			out = append(out, &bufferv1.WeightsRecord{Version: v, Digest: digest})
		}
	}
	return out, nil
}

func (e *export) segments(ctx context.Context, r Reader) ([]*bufferv1.SegmentRecord, error) {
	known, err := r.Segments(ctx)
	if err != nil {
		return nil, err
	}
	var out []*bufferv1.SegmentRecord
	for _, g := range known {
		report, err := e.scan(ctx, g)
		if err != nil {
			return nil, err
		}
		if report.Missing && !g.Trimmed {
			g.Trimmed = e.gone(ctx, g.Number)
		}
		if e.dropped[g.Number] = g.Trimmed; g.Trimmed {
			report.Flaw, report.Offset = "", 0
		}
		out = append(out, &bufferv1.SegmentRecord{
			Number: g.Number, Bytes: g.Bytes, Trimmed: g.Trimmed, FileBytes: report.Bytes, Missing: report.Missing,
			Flaw: report.Flaw, FlawOffset: report.Offset,
		})
	}
	return out, nil
}

// scan reads a segment's file, from the blobs where the local one, a cache then, is missing or damaged.
func (e *export) scan(ctx context.Context, g Segment) (segment.Report, error) {
	report, err := segment.Scan(e.Folder, g.Number, g.Bytes)
	if err != nil || e.Blobs == nil || g.Trimmed || !report.Missing && report.Flaw == "" {
		return report, err
	}
	err = vault{blobs: e.Blobs, run: e.run, dir: e.Folder}.fetch(ctx, g.Number)
	if errors.Is(err, blob.ErrNotFound) {
		return report, nil // the report says what is wrong
	}
	if errors.Is(err, blob.ErrCorrupt) {
		report.Flaw = err.Error()
		return report, nil
	}
	if err != nil {
		return report, err
	}
	return segment.Scan(e.Folder, g.Number, g.Bytes)
}

// gone reports whether a segment was dropped while the export read the ledger as it was before.
func (e *export) gone(ctx context.Context, number uint32) (trimmed bool) {
	_ = e.store.View(ctx, e.run, func(r Reader) error {
		segments, err := r.Segments(ctx)
		for _, g := range segments {
			trimmed = trimmed || g.Number == number && g.Trimmed
		}
		if trimmed {
			e.trimmed = max(e.trimmed, r.Ledger().Trimmed)
		}
		return err
	})
	return trimmed
}

// span is the range of positions that may have rows: a window beyond the last known group too, for samples whose group is lost.
func (e *export) span(ctx context.Context, r Reader, steps []*bufferv1.StepRecord) (from, to uint64, err error) {
	c := r.Ledger().Config
	from = c.GetFirstPosition()
	to = from
	for next := from; ; {
		groups, err := r.ListGroups(ctx, GroupQuery{From: next, Limit: listDefault})
		if err != nil {
			return 0, 0, err
		}
		if len(groups) == 0 {
			break
		}
		next = groups[len(groups)-1].Position + 1
		to = max(to, next)
	}
	window := uint64(c.GetGroupsPerStep())
	to = max(to, from+uint64(len(steps))*window)
	for _, s := range steps {
		to = max(to, s.GetEndPosition())
	}
	return from, to + window*(uint64(c.GetMaxStaleness())+1), nil
}

func (e *export) page(ctx context.Context, r Reader, from, to uint64) (*bufferv1.ExportLedgerResponse, error) {
	l, out := r.Ledger(), &bufferv1.ExportLedgerResponse{}
	groups, err := r.ListGroups(ctx, GroupQuery{From: from, To: to})
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		out.Groups = append(out.Groups, l.record(g))
	}
	positions := make([]uint64, 0, to-from)
	for p := from; p < to; p++ {
		positions = append(positions, p)
	}
	samples, err := r.Samples(ctx, positions)
	if err != nil {
		return nil, err
	}
	for i := range samples {
		out.Samples = append(out.Samples, e.sample(ctx, l, &samples[i]))
	}
	return out, nil
}

// sample is a row with what its payload says.
func (e *export) sample(ctx context.Context, l *Ledger, a *Sample) *bufferv1.SampleRecord {
	out := &bufferv1.SampleRecord{
		Ref: ref(l, a), Segment: a.Segment, MinVersion: a.MinVersion, ReceiptVersion: a.ReceiptVersion, ReceiptDigest: a.ReceiptDigest,
	}
	payload, err := e.payload(ctx, a)
	switch {
	case err != nil && (e.dropped[a.Segment] || errors.Is(err, fs.ErrNotExist) && a.Segment > 0 && e.gone(ctx, a.Segment)):
		out.Trimmed = true
		return out
	case err != nil:
		out.Flaw = err.Error()
		return out
	}
	t := &trajectoryv1.Trajectory{}
	if err := proto.Unmarshal(payload, t); err != nil {
		out.Flaw = fmt.Sprintf("it is no trajectory: %v", err)
		return out
	}
	out.Key, out.Spans = t.GetKey(), t.GetVersionSpans()
	for _, trained := range t.GetLossMask() {
		out.Trained += uint32(trained)
	}
	return out
}

func (e *export) payload(ctx context.Context, a *Sample) ([]byte, error) {
	if a.Segment > 0 {
		return e.files.Read(segment.Place{Segment: a.Segment, Offset: a.Offset, Length: a.Length}, a.CRC)
	}
	payload, err := e.Artifact(ctx, a.Ref)
	if err == nil && segment.CRC(payload) != a.CRC {
		err = errors.New("the artifact has another checksum")
	}
	return payload, err
}
