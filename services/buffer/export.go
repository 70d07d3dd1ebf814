package buffer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"google.golang.org/protobuf/encoding/protodelim"
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
	Scratch  string                                                // folder for a temporary file with the rows; "": os.TempDir
}

// Export passes every row of a ledger at one moment to send, with what its payloads and segments
// contain. The rows are copied to a temporary file first, so that no transaction is open while
// payloads are read and sent. Segments that are missing in the folder, or damaged, are downloaded
// into it if there are blobs; nothing else is changed. No service needs to run. It returns
// ledger.ErrNoLedger and the errors of send.
func Export(ctx context.Context, store ledger.Store, run string, from Payloads, send func(*bufferv1.ExportLedgerResponse) error) (err error) {
	rows, err := newSpool(from.Scratch)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	if err := store.View(ctx, run, func(r ledger.Reader) error { return rows.fill(ctx, r) }); err != nil {
		return err
	}
	e := &export{Payloads: from, store: store, run: run, files: segment.NewReader(from.Folder), dropped: map[uint32]bool{}}
	return errors.Join(e.send(ctx, rows, send), e.files.Close())
}

// spool is a temporary file of messages.
type spool struct {
	*os.File
	w *bufio.Writer
}

func newSpool(folder string) (*spool, error) {
	if folder != "" { // it may not exist before the first segment
		if err := os.MkdirAll(folder, 0o700); err != nil {
			return nil, fmt.Errorf("export the ledger: %w", err)
		}
	}
	f, err := os.CreateTemp(folder, ".export-*")
	if err != nil {
		return nil, fmt.Errorf("export the ledger: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil { // its space is free when it is closed
		return nil, errors.Join(fmt.Errorf("export the ledger: %w", err), f.Close())
	}
	return &spool{File: f, w: bufio.NewWriterSize(f, 1<<20)}, nil
}

// restart drops what was written.
func (s *spool) restart() error {
	s.w.Reset(s.File)
	if _, err := s.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return s.Truncate(0)
}

func (s *spool) add(m *bufferv1.ExportLedgerResponse) error {
	_, err := protodelim.MarshalTo(s.w, m)
	return err
}

// each passes on the messages in order.
func (s *spool) each(fn func(m *bufferv1.ExportLedgerResponse) error) error {
	if _, err := s.Seek(0, io.SeekStart); err != nil {
		return err
	}
	r := bufio.NewReaderSize(s.File, 1<<20)
	for {
		m := &bufferv1.ExportLedgerResponse{}
		err := protodelim.UnmarshalOptions{MaxSize: -1}.UnmarshalFrom(r, m)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := fn(m); err != nil {
			return err
		}
	}
}

// fill writes the rows of a ledger.
func (s *spool) fill(ctx context.Context, r ledger.Reader) error {
	if err := s.restart(); err != nil {
		return err
	}
	l := r.Ledger()
	state, err := ledger.StateMessage(ctx, r)
	if err != nil {
		return err
	}
	lineages, err := lineageRecords(ctx, r)
	if err != nil {
		return err
	}
	if err := s.add(&bufferv1.ExportLedgerResponse{Ledger: &bufferv1.LedgerRecord{
		Config: l.Config, State: state, Chain: l.Chain, Trimmed: l.Trimmed, Closed: l.Closed,
	}, Lineages: lineages}); err != nil {
		return err
	}
	if err := s.segments(ctx, r); err != nil {
		return err
	}
	if err := s.weights(ctx, r); err != nil {
		return err
	}
	steps, last, err := s.steps(ctx, r)
	if err != nil {
		return err
	}
	from, end, err := span(ctx, r, steps, last)
	if err != nil {
		return err
	}
	for ; from < end; from += exportPositions {
		if err := s.groups(ctx, r, from, min(end, from+exportPositions)); err != nil {
			return err
		}
	}
	return s.w.Flush()
}

func (s *spool) segments(ctx context.Context, r ledger.Reader) error {
	segments, err := r.Segments(ctx)
	if err != nil {
		return err
	}
	for some := range slices.Chunk(segments, page) {
		out := &bufferv1.ExportLedgerResponse{}
		for _, g := range some {
			out.Segments = append(out.Segments, &bufferv1.SegmentRecord{Number: g.Number, Bytes: g.Bytes, Trimmed: g.Trimmed})
		}
		if err := s.add(out); err != nil {
			return err
		}
	}
	return nil
}

func (s *spool) weights(ctx context.Context, r ledger.Reader) error {
	for next := uint64(0); ; {
		weights, err := r.ListWeights(ctx, next, page)
		if err != nil || len(weights) == 0 {
			return err
		}
		out := &bufferv1.ExportLedgerResponse{}
		for _, w := range weights {
			out.Weights = append(out.Weights, &bufferv1.WeightsRecord{Version: w.Version, Digest: w.Digest, Lineage: w.Lineage, RetrainedAt: w.Retrained})
			next = w.Version + 1
		}
		if err := s.add(out); err != nil {
			return err
		}
	}
}

func lineageRecords(ctx context.Context, r ledger.Reader) (out []*bufferv1.LineageRecord, err error) {
	lineages, err := r.Lineages(ctx)
	for _, l := range lineages {
		out = append(out, &bufferv1.LineageRecord{Lineage: l.Number, FirstVersion: l.First, Step: l.Step, OldLineage: l.Old})
	}
	return out, err
}

// steps writes the committed steps, and the one that is leased. It returns their number and the
// largest position at which one ends.
func (s *spool) steps(ctx context.Context, r ledger.Reader) (n, end uint64, err error) {
	last := r.Ledger().Step
	for next, full := uint64(0), true; full; {
		steps, err := r.Steps(ctx, ledger.StepQuery{From: next, Limit: page})
		if err != nil {
			return 0, 0, err
		}
		if full = len(steps) == page; full {
			next = steps[page-1].Step + 1
		} else {
			if len(steps) > 0 {
				last = max(last, steps[len(steps)-1].Step)
			}
			leased, err := r.Step(ctx, last+1)
			if err != nil {
				return 0, 0, err
			}
			if leased != nil {
				steps = append(steps, leased)
			}
		}
		out := &bufferv1.ExportLedgerResponse{}
		for _, step := range steps {
			out.Steps = append(out.Steps, step.Message())
			n, end = n+1, max(end, step.End)
		}
		if err := s.add(out); err != nil {
			return 0, 0, err
		}
	}
	return n, end, nil
}

// span is the range of positions that may have rows. It includes a window after the last known
// group, for samples whose group row is missing.
func span(ctx context.Context, r ledger.Reader, steps, last uint64) (from, end uint64, err error) {
	c := r.Ledger().Config
	from, window := c.GetFirstPosition(), uint64(c.GetGroupsPerStep())
	end, err = r.End(ctx)
	return from, max(from, end, from+steps*window, last) + window*(uint64(c.GetMaxStaleness())+1), err
}

// groups writes the groups and samples of a range of positions.
func (s *spool) groups(ctx context.Context, r ledger.Reader, from, end uint64) error {
	l, out := r.Ledger(), &bufferv1.ExportLedgerResponse{}
	groups, err := r.ListGroups(ctx, ledger.GroupQuery{From: from, To: end})
	if err != nil {
		return err
	}
	for _, g := range groups {
		out.Groups = append(out.Groups, l.GroupMessage(g))
	}
	positions := make([]uint64, 0, end-from)
	for p := from; p < end; p++ {
		positions = append(positions, p)
	}
	samples, err := r.Samples(ctx, positions)
	if err != nil {
		return err
	}
	for i := range samples {
		a := &samples[i]
		out.Samples = append(out.Samples, &bufferv1.SampleRecord{
			Ref: l.SampleMessage(a), Segment: a.Segment, MinVersion: a.MinVersion, ReceiptVersion: a.ReceiptVersion, ReceiptDigest: a.ReceiptDigest,
		})
	}
	return s.add(out)
}

// export adds to rows what segments and payloads contain.
type export struct {
	Payloads
	store   ledger.Store
	run     string
	files   *segment.Reader
	dropped map[uint32]bool // trimmed segments
	trimmed uint64          // steps covered by the snapshot that was taken while the export read
}

func (e *export) send(ctx context.Context, rows *spool, send func(*bufferv1.ExportLedgerResponse) error) error {
	var first *bufferv1.LedgerRecord
	err := rows.each(func(m *bufferv1.ExportLedgerResponse) error {
		if m.GetLedger() != nil {
			first = m.GetLedger()
			first.Folder = e.Folder
			if abs, err := filepath.Abs(e.Folder); err == nil {
				first.Folder = abs
			}
		}
		for _, g := range m.GetSegments() {
			if err := e.segment(ctx, g); err != nil {
				return err
			}
		}
		for _, sample := range m.GetSamples() {
			e.sample(ctx, sample)
		}
		return send(m)
	})
	if err != nil || e.trimmed <= first.GetTrimmed() {
		return err
	}
	// Payloads were deleted during the export: send the ledger again, with the snapshot that covers
	// them.
	again := proto.CloneOf(first)
	again.Trimmed = e.trimmed
	return send(&bufferv1.ExportLedgerResponse{Ledger: again})
}

// segment adds what the file of a segment contains.
func (e *export) segment(ctx context.Context, g *bufferv1.SegmentRecord) error {
	report, err := e.scan(ctx, g)
	if err != nil {
		return err
	}
	if report.Missing && !g.GetTrimmed() {
		g.Trimmed = e.gone(ctx, g.GetNumber())
	}
	if e.dropped[g.GetNumber()] = g.GetTrimmed(); g.GetTrimmed() {
		report.Flaw, report.Offset = "", 0
	}
	g.FileBytes, g.Missing, g.Flaw, g.FlawOffset = report.Bytes, report.Missing, report.Flaw, report.Offset
	return nil
}

// scan verifies a segment file. If it is a cache, and missing or damaged, the blob is downloaded.
func (e *export) scan(ctx context.Context, g *bufferv1.SegmentRecord) (segment.Report, error) {
	report, err := segment.Scan(e.Folder, g.GetNumber(), g.GetBytes())
	if err != nil || e.Blobs == nil || g.GetTrimmed() || !report.Missing && report.Flaw == "" {
		return report, err
	}
	err = segment.NewBucket(e.Blobs, e.run, e.Folder).Download(ctx, g.GetNumber())
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
	return segment.Scan(e.Folder, g.GetNumber(), g.GetBytes())
}

// gone reports whether a segment was trimmed after the rows were read.
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

// sample adds what the payload of a sample contains.
func (e *export) sample(ctx context.Context, out *bufferv1.SampleRecord) {
	payload, err := e.payload(ctx, out)
	number := out.GetSegment()
	switch {
	case err != nil && (e.dropped[number] || errors.Is(err, fs.ErrNotExist) && number > 0 && e.gone(ctx, number)):
		out.Trimmed = true
		return
	case err != nil:
		out.Flaw = err.Error()
		return
	}
	t := &trajectoryv1.Trajectory{}
	if err := proto.Unmarshal(payload, t); err != nil {
		out.Flaw = fmt.Sprintf("it is not a trajectory: %v", err)
		return
	}
	out.Key, out.Spans = t.GetKey(), t.GetVersionSpans()
	for _, trained := range t.GetLossMask() {
		out.Trained += uint32(trained)
	}
}

func (e *export) payload(ctx context.Context, s *bufferv1.SampleRecord) ([]byte, error) {
	ref := s.GetRef()
	if s.GetSegment() > 0 {
		return e.files.Read(segment.Place{Segment: s.GetSegment(), Offset: ref.GetOffset(), Length: ref.GetLength()}, ref.GetCrc32C())
	}
	payload, err := e.Artifact(ctx, ref.GetPayloadRef())
	if err == nil && segment.CRC(payload) != ref.GetCrc32C() {
		err = errors.New("the artifact has a wrong checksum")
	}
	return payload, err
}
