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
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// exportPositions is the number of positions that one message of an export covers.
const exportPositions = 512

// Payloads tells where the payloads of a run are.
type Payloads struct {
	Folder   string                                                // of segments
	Blobs    segment.Blobs                                         // provides segments that are not in the folder; nil: all are in the folder
	Artifact func(ctx context.Context, ref string) ([]byte, error) // reads a payload of the storage service
}

// Export passes every row of a ledger at one moment to send, with what its payloads and segments
// contain. Segments that are missing in the folder, or damaged, are downloaded into it if there are
// blobs; nothing else is changed. No service needs to run. It returns ledger.ErrNoLedger and the
// errors of send.
func Export(ctx context.Context, store ledger.Store, run string, from Payloads, send func(*bufferv1.ExportLedgerResponse) error) error {
	e := &export{Payloads: from, store: store, run: run, send: send, files: segment.NewReader(from.Folder), dropped: map[uint32]bool{}}
	return errors.Join(store.View(ctx, run, func(r ledger.Reader) error { return e.rows(ctx, r) }), e.files.Close())
}

type export struct {
	Payloads
	store   ledger.Store
	run     string
	send    func(*bufferv1.ExportLedgerResponse) error
	files   *segment.Reader
	dropped map[uint32]bool // trimmed segments
	trimmed uint64          // steps covered by the snapshot that was taken while the export read
}

func (e *export) rows(ctx context.Context, r ledger.Reader) error {
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
	// Payloads were deleted during the export: send the ledger again, with the snapshot that covers
	// them.
	again := proto.CloneOf(first.GetLedger())
	again.Trimmed = e.trimmed
	return e.send(&bufferv1.ExportLedgerResponse{Ledger: again})
}

// head is the ledger, its segments, weights and steps.
func (e *export) head(ctx context.Context, r ledger.Reader) (*bufferv1.ExportLedgerResponse, error) {
	l := r.Ledger()
	state, err := ledger.StateMessage(ctx, r)
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
		out.Steps = append(out.Steps, s.Message())
		last, newest = max(last, s.Step), max(newest, s.Step)
	}
	leased, err := r.Step(ctx, last+1)
	if err != nil {
		return nil, err
	}
	if leased != nil {
		out.Steps = append(out.Steps, leased.Message())
	}
	if out.Weights, err = weightsRecords(ctx, r, l.Config.GetFirstStep(), newest+1); err != nil {
		return nil, err
	}
	out.Segments, err = e.segments(ctx, r)
	return out, err
}

func weightsRecords(ctx context.Context, r ledger.Reader, from, to uint64) ([]*bufferv1.WeightsRecord, error) {
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

func (e *export) segments(ctx context.Context, r ledger.Reader) ([]*bufferv1.SegmentRecord, error) {
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

// scan verifies a segment file. If it is a cache, and missing or damaged, the blob is downloaded.
func (e *export) scan(ctx context.Context, g ledger.Segment) (segment.Report, error) {
	report, err := segment.Scan(e.Folder, g.Number, g.Bytes)
	if err != nil || e.Blobs == nil || g.Trimmed || !report.Missing && report.Flaw == "" {
		return report, err
	}
	err = segment.NewBucket(e.Blobs, e.run, e.Folder).Download(ctx, g.Number)
	if errors.Is(err, blob.ErrNotFound) {
		return report, nil // the report describes the problem
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

// gone reports whether a segment was trimmed after the snapshot that the export reads.
func (e *export) gone(ctx context.Context, number uint32) (trimmed bool) {
	_ = e.store.View(ctx, e.run, func(r ledger.Reader) error {
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

// span is the range of positions that may have rows. It includes a window after the last known
// group, for samples whose group row is missing.
func (e *export) span(ctx context.Context, r ledger.Reader, steps []*bufferv1.StepRecord) (from, to uint64, err error) {
	c := r.Ledger().Config
	from = c.GetFirstPosition()
	to = from
	for next := from; ; {
		groups, err := r.ListGroups(ctx, ledger.GroupQuery{From: next, Limit: listDefault})
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

func (e *export) page(ctx context.Context, r ledger.Reader, from, to uint64) (*bufferv1.ExportLedgerResponse, error) {
	l, out := r.Ledger(), &bufferv1.ExportLedgerResponse{}
	groups, err := r.ListGroups(ctx, ledger.GroupQuery{From: from, To: to})
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		out.Groups = append(out.Groups, l.GroupMessage(g))
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

// sample is a row with the contents of its payload.
func (e *export) sample(ctx context.Context, l *ledger.Ledger, a *ledger.Sample) *bufferv1.SampleRecord {
	out := &bufferv1.SampleRecord{
		Ref: l.SampleMessage(a), Segment: a.Segment, MinVersion: a.MinVersion, ReceiptVersion: a.ReceiptVersion, ReceiptDigest: a.ReceiptDigest,
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
		out.Flaw = fmt.Sprintf("it is not a trajectory: %v", err)
		return out
	}
	out.Key, out.Spans = t.GetKey(), t.GetVersionSpans()
	for _, trained := range t.GetLossMask() {
		out.Trained += uint32(trained)
	}
	return out
}

func (e *export) payload(ctx context.Context, a *ledger.Sample) ([]byte, error) {
	if a.Segment > 0 {
		return e.files.Read(segment.Place{Segment: a.Segment, Offset: a.Offset, Length: a.Length}, a.CRC)
	}
	payload, err := e.Artifact(ctx, a.Ref)
	if err == nil && segment.CRC(payload) != a.CRC {
		err = errors.New("the artifact has a wrong checksum")
	}
	return payload, err
}
