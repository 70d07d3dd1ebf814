package buffer_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
	"github.com/rollout-rl/rollout/services/buffer/sqlstore"
)

func TestOpenLedgersIngestAgainAfterARestart(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	s.publish(groupOf(0, 0, 0)...)
	s.samples(size)
	s.stop()
	s.publish(groupOf(1, 0, 0)...) // while the buffer is stopped
	tear(t, filepath.Join(s.cfg.Segments, run, "000001.seg"))
	s.start()
	b := s.lease(1) // without another OpenLedger
	if got, err := s.payloads(1); err != nil || len(got) != 2*size {
		t.Fatalf("%d payloads: %v", len(got), err)
	}
	s.restart()
	if again := s.lease(1); !proto.Equal(b, again) {
		t.Errorf("another batch after a restart: %v", again)
	}
	s.commit(b)
}

// tear appends the part of a record that a crash during an append leaves.
func tear(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(bytes.Repeat([]byte{0xff}, 333)); err != nil {
		t.Fatal(err)
	}
}

func TestDamagedPayloadIsNamed(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(b []byte, end uint64) []byte{ // end of the last payload
		"bit flip":  func(b []byte, end uint64) []byte { b[end-20] ^= 0x10; return b },
		"truncated": func(b []byte, end uint64) []byte { return b[:end-20] },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := setup(t)
			s.open(ledgerConfig())
			s.record(0)
			s.publish(append(groupOf(0, 0, 0), groupOf(1, 0, 0)...)...)
			b := s.lease(1)
			last := b.GetSamples()[len(b.GetSamples())-1]
			file, err := os.ReadFile(last.GetSegment())
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(last.GetSegment(), damage(file, last.GetOffset()+last.GetLength()), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err = s.payloads(1)
			e, ok := rpcerr.From(err)
			if !ok || e.Code() != codes.DataLoss || e.Reason() != "PAYLOAD_LOST" {
				t.Fatalf("got %v", err)
			}
			if m := e.Metadata(); m["run"] != run || m["group"] != "0/1" || m["segment"] != "1" || m["offset"] == "" {
				t.Errorf("metadata %v", m)
			}
			if name == "bit flip" {
				return
			}
			s.restart()                                                 // the file is shorter than its durable part
			s.publish(append(groupOf(2, 0, 0), groupOf(3, 0, 0)...)...) // and ingest continues
			s.samples(4 * size)
			if got := s.events.reasons(); got["PAYLOAD_LOST"] != 1 {
				t.Errorf("events %v", got)
			}
		})
	}
}

func TestMalformedMessagesAreRefused(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	if err := s.bus.Conn().Publish(names.TrajSubject(run), []byte("\xff\xff\xff")); err != nil {
		t.Fatal(err)
	}
	s.publish(groupOf(0, 0, 0)...)
	s.until("both messages", func(l *bufferv1.LedgerState) bool { return l.GetRefused() == 1 && l.GetSamples() == size })
	s.restart()
	s.publish(groupOf(1, 0, 0)...)
	s.until("the next", func(l *bufferv1.LedgerState) bool { return l.GetRefused() == 1 && l.GetSamples() == 2*size })
}

func TestClosedLedgerIngestsNothing(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	for range 2 {
		if _, err := s.client.CloseLedger(t.Context(), &bufferv1.CloseLedgerRequest{RunId: run}); err != nil {
			t.Fatal(err)
		}
	}
	s.publish(groupOf(0, 0, 0)...)
	s.restart()
	if w := s.waiting(1); w != "2 of 2 groups of step 1 (inference workers); the ledger to be opened again: ingest is stopped (scheduler)" {
		t.Errorf("waits for %q", w)
	}
	s.open(ledgerConfig())
	s.samples(size)
}

func TestLedgerMayBeOpenedBeforeItsStream(t *testing.T) {
	t.Parallel()
	s := setup(t)
	if err := s.bus.DeleteRun(t.Context(), run); err != nil {
		t.Fatal(err)
	}
	s.open(ledgerConfig())
	if err := s.bus.EnsureRun(t.Context(), run); err != nil {
		t.Fatal(err)
	}
	s.publish(groupOf(0, 0, 0)...)
	s.samples(size)
}

// Payloads that are trimmed during an export are reported with the snapshot that covers them, not
// as lost.
func TestExportDuringATrim(t *testing.T) {
	t.Parallel()
	s := setup(t)
	c := ledgerConfig()
	c.MaxStaleness = 10
	s.open(c)
	s.record(0)
	for step := range uint64(6) {
		s.publish(append(groupOf(2*step, 0, 0), groupOf(2*step+1, 0, 0)...)...)
		s.commit(s.lease(step + 1))
	}
	store, err := sqlstore.Open(t.Context(), sqldb.Files(filepath.Join(s.folder, "db")))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	var covered []uint64
	trimmed := 0
	err = buffer.Export(t.Context(), store, run, buffer.Payloads{
		Folder: filepath.Join(s.folder, "segments", run), Scratch: filepath.Join(t.TempDir(), "not", "made"),
	}, func(rows *bufferv1.ExportLedgerResponse) error {
		if l := rows.GetLedger(); l != nil {
			covered = append(covered, l.GetTrimmed())
		}
		for _, sample := range rows.GetSamples() {
			if sample.GetTrimmed() {
				trimmed++
			}
			if sample.GetFlaw() != "" {
				t.Errorf("a sample is reported as lost: %s", sample.GetFlaw())
			}
		}
		if len(covered) > 1 || len(rows.GetSamples()) > 0 {
			return nil
		}
		_, err := s.client.TrimPayloads(t.Context(), &bufferv1.TrimPayloadsRequest{RunId: run, ThroughStep: 4})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(covered, []uint64{0, 4}) || trimmed == 0 {
		t.Errorf("the export reported snapshots up to %v and %d trimmed payloads", covered, trimmed)
	}
}

// twice runs each view twice, as PostgreSQL may, and reports whether one is open.
type twice struct {
	ledger.Store
	open bool
}

func (s *twice) View(ctx context.Context, run string, fn func(ledger.Reader) error) error {
	return s.Store.View(ctx, run, func(r ledger.Reader) error {
		s.open = true
		defer func() { s.open = false }()
		return errors.Join(fn(r), fn(r))
	})
}

// PostgreSQL ends transactions that are idle for two seconds, and an export reads files and waits
// for its reader.
func TestExportSendsOutsideOfTheTransaction(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	s.publish(append(groupOf(0, 0, 0), groupOf(1, 0, 0)...)...)
	s.commit(s.lease(1))
	store, err := sqlstore.Open(t.Context(), sqldb.Files(filepath.Join(s.folder, "db")))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	watched := &twice{Store: store}
	got := &bufferv1.ExportLedgerResponse{}
	from := buffer.Payloads{Folder: filepath.Join(s.folder, "segments", run)}
	if err := buffer.Export(t.Context(), watched, run, from, func(rows *bufferv1.ExportLedgerResponse) error {
		if watched.open {
			t.Error("a transaction is open")
		}
		proto.Merge(got, rows)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if len(got.GetSteps()) != 1 || len(got.GetWeights()) != 2 || len(got.GetGroups()) != 2 || len(got.GetSamples()) != 2*size || len(got.GetSegments()) != 1 {
		t.Errorf("%d steps, %d versions, %d groups, %d samples, %d segments", len(got.GetSteps()), len(got.GetWeights()), len(got.GetGroups()), len(got.GetSamples()), len(got.GetSegments()))
	}
}

// A commit with trim deletes the payloads of its step and those before, and may be repeated.
func TestCommitTrims(t *testing.T) {
	t.Parallel()
	s := setup(t)
	c := ledgerConfig()
	c.MaxStaleness = 10
	s.open(c)
	s.record(0)
	for step := range uint64(6) { // 8 KiB per segment, 4 KiB per step
		s.publish(append(groupOf(2*step, 0, 0), groupOf(2*step+1, 0, 0)...)...)
		b := s.lease(step + 1)
		commit := &bufferv1.CommitStepRequest{RunId: run, Step: step + 1, BatchId: b.GetBatchId(), WeightsDigest: digest(step + 1), Trim: step == 4}
		for range 2 {
			if _, err := s.client.CommitStep(t.Context(), commit); err != nil {
				t.Fatal(err)
			}
		}
		_, err := s.payloads(1)
		if gone := rpcerr.Reason(err) == "PAYLOADS_TRIMMED"; gone != (step >= 4) {
			t.Errorf("payloads of step 1 after step %d: %v", step+1, err)
		}
	}
	if got, err := s.payloads(6); err != nil || len(got) != 2*size {
		t.Errorf("step 6: %d payloads, %v", len(got), err)
	}
}

func TestTrimDropsWhatASnapshotCovers(t *testing.T) {
	t.Parallel()
	s := setup(t)
	c := ledgerConfig()
	c.MaxStaleness = 10
	s.open(c)
	s.record(0)
	for step := range uint64(8) { // 8 KiB per segment, 4 KiB per step
		s.publish(append(groupOf(2*step, 0, 0), groupOf(2*step+1, 0, 0)...)...)
		b := s.lease(step + 1)
		if step < 7 {
			s.commit(b)
		}
	}
	trim := func(through uint64) uint64 {
		r, err := s.client.TrimPayloads(t.Context(), &bufferv1.TrimPayloadsRequest{RunId: run, ThroughStep: through})
		if err != nil {
			t.Fatal(err)
		}
		return r.GetBytes()
	}
	first := trim(4)
	if first == 0 || trim(4) != 0 {
		t.Errorf("freed %d", first)
	}
	if _, err := s.payloads(1); rpcerr.Reason(err) != "PAYLOADS_TRIMMED" {
		t.Errorf("payloads of step 1: %v", err)
	}
	for _, step := range []uint64{5, 6, 7, 8} {
		if got, err := s.payloads(step); err != nil || len(got) != 2*size {
			t.Errorf("step %d: %d payloads, %v", step, len(got), err)
		}
	}
	trim(100) // covers committed steps, not the leased one
	if got, err := s.payloads(8); err != nil || len(got) != 2*size {
		t.Errorf("leased step: %d payloads, %v", len(got), err)
	}
	if b, err := s.client.GetBatch(t.Context(), &bufferv1.GetBatchRequest{RunId: run, Step: 1}); err != nil || len(b.GetBatch().GetSamples()) != 2*size {
		t.Errorf("the record of a trimmed step: %v", err)
	}
	s.restart()
	s.commit(s.lease(8))
}

// artifacts is a storage service with some artifacts.
type artifacts struct {
	mu   sync.Mutex
	have map[string][]byte
	away bool
}

func (a *artifacts) put(payload []byte) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.have == nil {
		a.have = map[string][]byte{}
	}
	a.have[id.Content(payload)] = payload
	return id.Content(payload)
}

func (a *artifacts) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.have)
}

func (a *artifacts) setAway(away bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.away = away
}

func (a *artifacts) GetArtifact(ctx context.Context, in *storagev1.GetArtifactRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[storagev1.GetArtifactResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	payload, ok := a.have[in.GetContentId()]
	if !ok {
		return nil, rpcerr.New(codes.NotFound, "ARTIFACT_NOT_FOUND", "no")
	}
	return &download{ctx: ctx, left: [][]byte{payload[:10], payload[10:]}}, nil
}

func (a *artifacts) DeleteArtifacts(_ context.Context, in *storagev1.DeleteArtifactsRequest, _ ...grpc.CallOption) (*storagev1.DeleteArtifactsResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.away || in.GetRunId() != run {
		return nil, rpcerr.New(codes.Unavailable, "AWAY", "away")
	}
	for _, content := range in.GetContentIds() {
		delete(a.have, content)
	}
	return &storagev1.DeleteArtifactsResponse{}, nil
}

type download struct {
	grpc.ClientStream
	ctx  context.Context
	left [][]byte
}

func (d *download) Header() (metadata.MD, error) { return nil, nil }
func (d *download) Recv() (*storagev1.GetArtifactResponse, error) {
	if len(d.left) == 0 {
		return nil, ioEOF
	}
	chunk := d.left[0]
	d.left = d.left[1:]
	return &storagev1.GetArtifactResponse{Chunk: chunk}, nil
}

func TestPayloadByReference(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	large := sampleOf(0, 0, 0)
	payload := large.Payload
	large.Payload, large.PayloadRef = nil, id.Content(payload)
	s.publish(append([]*trajectoryv1.TrajectoryEnvelope{large}, groupOf(0, 0, 0)[1:]...)...)
	s.publish(groupOf(1, 0, 0)...)
	ref := s.lease(1).GetSamples()[0]
	if ref.GetPayloadRef() != id.Content(payload) || ref.GetSegment() != "" {
		t.Errorf("%v", ref)
	}
	if _, err := s.payloads(1); rpcerr.Reason(err) != "ARTIFACTS_UNAVAILABLE" {
		t.Errorf("without storage: %v", err)
	}
	stored := &artifacts{}
	stored.put(payload)
	s.deps.Artifacts = stored
	s.restart()
	if got, err := s.payloads(1); err != nil || len(got) != 2*size || got[0].GetKey().GetSample() != 0 {
		t.Errorf("%d payloads: %v", len(got), err)
	}
}

func TestALeaseWaitsForTheLastSample(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	began := time.Now()
	r, err := s.client.LeaseBatch(t.Context(), &bufferv1.LeaseBatchRequest{RunId: run, Step: 1, WaitSeconds: 0.05})
	if err != nil || r.GetBatch() != nil || time.Since(began) < 50*time.Millisecond {
		t.Fatalf("%v %v", r, err)
	}
	leased := make(chan *bufferv1.Batch, 3)
	for range cap(leased) { // all callers get the same batch
		go func() {
			r, _ := s.client.LeaseBatch(t.Context(), &bufferv1.LeaseBatchRequest{RunId: run, Step: 1, WaitSeconds: 20})
			leased <- r.GetBatch()
		}()
	}
	s.publish(slices.Concat(groupOf(0, 0, 0), groupOf(1, 0, 0))...)
	first := <-leased
	for range cap(leased) - 1 {
		if next := <-leased; first == nil || !proto.Equal(first, next) {
			t.Errorf("%v and %v", first, next)
		}
	}
}

// A watcher that does not read must not block the ledger. It sees the newest state when it reads
// again.
func TestSlowWatcherSeesTheNewest(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	slow, err := s.client.WatchLedger(t.Context(), &bufferv1.WatchLedgerRequest{RunId: run})
	if err != nil {
		t.Fatal(err)
	}
	const messages = 300
	for i := range uint32(messages) {
		s.publish(sampleOf(0, 0, i%2)) // never complete
	}
	s.until("all of it", func(l *bufferv1.LedgerState) bool { return l.GetSamples()+l.GetDuplicates() == messages })
	seen := 0
	for {
		m, err := slow.Recv()
		if err != nil {
			t.Fatal(err)
		}
		seen++
		if l := m.GetState(); l.GetSamples()+l.GetDuplicates() == messages {
			break
		}
	}
	if seen > messages+3 {
		t.Errorf("%d messages for %d changes", seen, messages)
	}
}

// If any byte of a segment is flipped, or the segment is cut off anywhere, the export reports it
// with run, group, sample, and offset of each damaged payload, and no damaged payload is returned.
func TestDamageOfAnyByteOfASegmentIsReported(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	s.publish(append(groupOf(0, 0, 0), groupOf(1, 0, 0)...)...)
	b := s.lease(1)
	path := b.GetSamples()[0].GetSegment()
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	try := func(what string, at int, data []byte, cut bool) {
		t.Helper()
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		export := s.export()
		for _, sample := range export.GetSamples() {
			ref := sample.GetRef()
			first, end := int(ref.GetOffset())-segment.HeaderBytes, int(ref.GetOffset()+ref.GetLength())
			bad := at < 8 || at >= first && at < end || cut && at < end
			if bad != (sample.GetFlaw() != "") {
				t.Fatalf("%s at byte %d: sample at %d to %d: flaw %q", what, at, first, end, sample.GetFlaw())
			}
		}
		if export.GetSegments()[0].GetFlaw() == "" {
			t.Fatalf("%s at byte %d was not found", what, at)
		}
		if got, err := s.payloads(1); rpcerr.Reason(err) != "PAYLOAD_LOST" {
			t.Fatalf("%s at byte %d: %d payloads were returned: %v", what, at, len(got), err)
		}
	}
	for at := 0; at < len(whole); at += 1 + at/64 { // every byte of the first record, then fewer, because the other records are similar
		spoiled := append([]byte(nil), whole...)
		spoiled[at] ^= 0x20
		try("a flip", at, spoiled, false)
		try("a cut", at, whole[:at], true)
	}
}

// export is the whole ledger with the contents of its files.
func (s *bench) export() *bufferv1.ExportLedgerResponse {
	s.Helper()
	stream, err := s.client.ExportLedger(s.Context(), &bufferv1.ExportLedgerRequest{RunId: run})
	if err != nil {
		s.Fatal(err)
	}
	all := &bufferv1.ExportLedgerResponse{}
	for {
		part, err := stream.Recv()
		if err != nil {
			if err := ignoreEOF(err); err != nil {
				s.Fatal(err)
			}
			return all
		}
		proto.Merge(all, part)
	}
}
