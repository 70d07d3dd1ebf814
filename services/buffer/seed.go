package buffer

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"

	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// seed fills a new ledger with the groups of a snapshot.
type seed struct {
	artifacts Artifacts
	config    *bufferv1.LedgerConfig
	writer    *segment.Writer

	groups   []*ledger.Group
	samples  []ledger.Sample
	weights  []ledger.Weights
	segments []ledger.Segment
}

// seed begins the ledger of a run with the groups of its config's snapshot, unless it has begun.
// Payloads are durable before a row names them; a crash in between leaves segments without rows,
// which are deleted when ingest starts. ledger.ErrConfig, ErrLeaving.
func (rs *runs) seed(ctx context.Context, r *run, config *bufferv1.LedgerConfig) error {
	begun := false
	if err := r.View(ctx, func(reader ledger.Reader) (err error) {
		if !proto.Equal(reader.Ledger().Config, config) {
			return ledger.ErrConfig.With("run", r.id)
		}
		if begun = !reader.Ledger().Closed; !begun {
			begun, err = ledger.Begun(ctx, reader)
		}
		return err
	}); err != nil || begun {
		return err
	}
	if rs.deps.Artifacts == nil {
		return ErrNoArtifacts.With("ref", config.GetSeed().GetRows())
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(rs.life, func() { cancel(ErrLeaving) })()
	if err := rs.fill(ctx, r, config); err != nil {
		if errors.Is(context.Cause(ctx), ErrLeaving) {
			return ErrLeaving
		}
		return fmt.Errorf("begin the ledger of %s with the groups of a snapshot: %w", r.id, err)
	}
	return nil
}

// fill downloads a snapshot into segments and rows.
func (rs *runs) fill(ctx context.Context, r *run, config *bufferv1.LedgerConfig) error {
	folder := rs.cfg.folder(r.id)
	bucket := segment.NewBucket(rs.deps.Blobs, r.id, folder)
	newest := uint32(0)
	if bucket != nil { // an earlier attempt, perhaps on another host, may have used numbers
		var err error
		if newest, err = bucket.Newest(ctx); err != nil {
			return err
		}
	}
	files := segment.Config{Dir: folder, RollBytes: rs.cfg.SegmentBytes, Volatile: rs.cfg.Durability == Process || bucket != nil, Datasync: rs.deps.Datasync}
	writer, _, err := segment.Open(files, nil, newest)
	if err != nil {
		return err
	}
	s := &seed{artifacts: rs.deps.Artifacts, config: config, writer: writer}
	if err := errors.Join(s.read(ctx), writer.Close()); err != nil {
		return err
	}
	if bucket != nil {
		for _, g := range s.segments {
			if err := bucket.Upload(ctx, g.Number); err != nil {
				return err
			}
		}
	}
	crashpoint.Here("buffer/seeding") // payloads are durable, no row names them
	return r.Update(ctx, func(tx ledger.Tx) error { return ledger.Seed(ctx, tx, s.groups, s.samples, s.weights, s.segments) })
}

// read downloads the rows, and appends their payloads to segments.
func (s *seed) read(ctx context.Context) error {
	of := s.config.GetSeed()
	rows := bufio.NewReaderSize(s.download(ctx, of.GetRows()), 1<<20)
	payloads := bufio.NewReaderSize(s.download(ctx, of.GetPayloads()), 1<<20)
	for {
		m := &bufferv1.CutLedgerResponse{}
		err := protodelim.UnmarshalOptions{MaxSize: 64 << 20}.UnmarshalFrom(rows, m)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read the rows: %w", err)
		}
		if err := s.take(m, payloads); err != nil {
			return err
		}
	}
	if _, err := io.Copy(io.Discard, payloads); err != nil { // the storage service verifies the digest at the end
		return fmt.Errorf("read the payloads: %w", err)
	}
	return s.writer.Sync()
}

func (s *seed) take(m *bufferv1.CutLedgerResponse, payloads io.Reader) error {
	for _, w := range m.GetWeights() {
		if n := len(s.weights); n > 0 && s.weights[n-1].Version == w.GetVersion() { // of the newer lineage
			s.weights = s.weights[:n-1]
		}
		s.weights = append(s.weights, ledger.Weights{Version: w.GetVersion(), Digest: w.GetDigest()})
	}
	for _, g := range m.GetGroups() {
		if g.GetState() < ledger.Open || g.GetState() > ledger.Dissolved {
			return ErrLost.With("position", fmt.Sprint(g.GetPosition())).WithMessage("the group at position %d of the snapshot has the unknown state %d", g.GetPosition(), g.GetState())
		}
		s.groups = append(s.groups, &ledger.Group{
			Position: g.GetPosition(), Attempt: g.GetKey().GetAttempt(), State: g.GetState(), Reason: g.GetReason(), Step: g.GetStep(), Samples: g.GetSamples(),
			Pending: g.GetPending(), Failures: g.GetFailures(), MinVersion: g.GetMinVersion(), Arrival: g.GetArrival(), TokenRewards: g.GetTokenRewards(),
		})
	}
	var records []segment.Record
	for _, a := range m.GetSamples() {
		payload, err := readPayload(payloads, a.GetRef().GetLength())
		if err != nil {
			return fmt.Errorf("read the payload at byte %d: %w", a.GetRef().GetOffset(), err)
		}
		if segment.CRC(payload) != a.GetRef().GetCrc32C() {
			return ErrLost.With("offset", fmt.Sprint(a.GetRef().GetOffset())).WithMessage("the payload at byte %d of the snapshot has a wrong checksum", a.GetRef().GetOffset())
		}
		records = append(records, segment.Record{Payload: payload, CRC: a.GetRef().GetCrc32C()})
	}
	if len(records) == 0 {
		return nil
	}
	places, err := s.writer.Append(records)
	if err != nil {
		return err
	}
	if err := s.writer.Sync(); err != nil { // before the next append may begin another file
		return err
	}
	for i, a := range m.GetSamples() {
		if err := s.sample(a, places[i]); err != nil {
			return err
		}
	}
	tail := s.writer.Tail()
	if n := len(s.segments); n > 0 && s.segments[n-1].Number == tail.Segment {
		s.segments = s.segments[:n-1]
	}
	s.segments = append(s.segments, ledger.Segment{Number: tail.Segment, Bytes: tail.Bytes})
	return nil
}

// readPayload reads a payload. It needs no more memory than there are bytes, whatever length a row
// of an imported snapshot names.
func readPayload(from io.Reader, length uint64) ([]byte, error) {
	if length > math.MaxUint32 { // the length of a record in a segment has 32 bits
		return nil, ErrLost.WithMessage("the snapshot names a payload of %d bytes", length)
	}
	var payload bytes.Buffer
	payload.Grow(int(min(length, chunkBytes)))
	if _, err := io.CopyN(&payload, from, int64(length)); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return payload.Bytes(), nil
}

func (s *seed) sample(a *bufferv1.SampleRecord, at segment.Place) error {
	ref, key := a.GetRef(), a.GetRef().GetKey()
	var times []byte
	if ref.GetTimes() != nil {
		var err error
		if times, err = proto.Marshal(ref.GetTimes()); err != nil {
			return err
		}
	}
	s.samples = append(s.samples, ledger.Sample{
		Position: uint64(key.GetEpoch())*s.config.GetRows() + key.GetIndex(), Sample: key.GetSample(), Part: key.GetPart(), Attempt: key.GetAttempt(),
		Segment: at.Segment, Offset: at.Offset, Length: at.Length, CRC: ref.GetCrc32C(), Reward: ref.GetReward(), Outcome: ref.GetOutcome(),
		MinVersion: a.GetMinVersion(), ReceiptVersion: a.GetReceiptVersion(), ReceiptDigest: a.GetReceiptDigest(), Times: times,
	})
	return nil
}

// download reads an artifact. The last read fails if its bytes do not have the content id.
func (s *seed) download(ctx context.Context, content string) io.Reader {
	return &artifactReader{open: func() (receiver, error) {
		return s.artifacts.GetArtifact(ctx, &storagev1.GetArtifactRequest{ContentId: content})
	}}
}

type receiver interface {
	Recv() (*storagev1.GetArtifactResponse, error)
}

type artifactReader struct {
	open   func() (receiver, error)
	stream receiver
	rest   []byte
}

func (d *artifactReader) Read(p []byte) (int, error) {
	if d.stream == nil {
		stream, err := d.open()
		if err != nil {
			return 0, err
		}
		d.stream = stream
	}
	for len(d.rest) == 0 {
		part, err := d.stream.Recv()
		if err != nil {
			return 0, err
		}
		d.rest = part.GetChunk()
	}
	n := copy(p, d.rest)
	d.rest = d.rest[n:]
	return n, nil
}
