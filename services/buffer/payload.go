package buffer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// chunkBytes is about what one message of ReadPayloads holds.
const chunkBytes = 1 << 20

// refs says where samples are.
func (s *Service) refs(l *Ledger, samples []Sample) []*bufferv1.SampleRef {
	folder := s.folder(l.Run)
	if abs, err := filepath.Abs(folder); err == nil {
		folder = abs
	}
	paths := map[uint32]string{}
	out := make([]*bufferv1.SampleRef, len(samples))
	for i := range samples {
		a := &samples[i]
		out[i] = ref(l, a)
		if a.Segment > 0 {
			if paths[a.Segment] == "" {
				paths[a.Segment] = segment.Path(folder, a.Segment)
			}
			out[i].Segment = paths[a.Segment]
		}
	}
	return out
}

// ref is a sample without the file that it is in.
func ref(l *Ledger, a *Sample) *bufferv1.SampleRef {
	rows := l.Config.GetRows()
	return &bufferv1.SampleRef{
		Key: &trajectoryv1.TrajectoryKey{RunId: l.Run, Epoch: uint32(a.Position / rows), Index: a.Position % rows,
			Attempt: a.Attempt, Sample: a.Sample, Part: a.Part},
		Offset: a.Offset, Length: a.Length, Crc32C: a.CRC, Reward: a.Reward, Outcome: a.Outcome, PayloadRef: a.Ref,
	}
}

// payloads gives the payloads of a step's batch in its order, some at a time. ErrNoBatch, ErrTrimmed, ErrLost.
func (s *Service) payloads(ctx context.Context, run string, step uint64, give func([][]byte) error) (err error) {
	var samples []Sample
	var ledger Ledger
	err = s.deps.Store.View(ctx, run, func(r Reader) error {
		ledger = *r.Ledger()
		known, err := r.Step(ctx, step)
		if err == nil && known == nil {
			err = ErrNoBatch.With("step", fmt.Sprint(step))
		}
		if err != nil {
			return err
		}
		samples, err = r.BatchSamples(ctx, step)
		return err
	})
	if err != nil {
		return err
	}
	files := segment.NewReader(s.folder(run))
	defer func() { err = errors.Join(err, files.Close()) }()
	var chunk [][]byte
	size := 0
	for i := range samples {
		payload, err := s.payload(ctx, files, &ledger, step, &samples[i])
		if err != nil {
			return err
		}
		if size > 0 && size+len(payload) > chunkBytes {
			if err := give(chunk); err != nil {
				return err
			}
			chunk, size = nil, 0
		}
		chunk, size = append(chunk, payload), size+len(payload)
	}
	if len(chunk) == 0 {
		return nil
	}
	return give(chunk)
}

// payload reads one payload and checks it.
func (s *Service) payload(ctx context.Context, files *segment.Reader, l *Ledger, step uint64, a *Sample) ([]byte, error) {
	rows := l.Config.GetRows()
	where := func(e *rpcerr.Error) *rpcerr.Error {
		return e.With("run", l.Run).With("group", fmt.Sprintf("%d/%d", a.Position/rows, a.Position%rows)).With("sample", fmt.Sprint(a.Sample)).
			With("segment", fmt.Sprint(a.Segment)).With("offset", fmt.Sprint(a.Offset)).With("ref", a.Ref)
	}
	if a.Segment == 0 {
		payload, err := s.fetch(ctx, a.Ref)
		switch {
		case err != nil:
			return nil, fmt.Errorf("fetch payload %s: %w", a.Ref, err)
		case segment.CRC(payload) != a.CRC:
			return nil, where(ErrLost)
		}
		return payload, nil
	}
	place := segment.Place{Segment: a.Segment, Offset: a.Offset, Length: a.Length}
	payload, err := files.Read(place, a.CRC)
	if v := s.vault(l.Run); err != nil && v != nil { // the local file is a cache: missing on another host, or damaged
		if fetchErr := v.fetch(ctx, a.Segment); fetchErr == nil {
			files.Forget(a.Segment)
			payload, err = files.Read(place, a.CRC)
		} else if rpcerr.Code(fetchErr) == codes.Unavailable {
			return nil, fetchErr
		} else {
			err = errors.Join(err, fetchErr)
		}
	}
	if err == nil {
		return payload, nil
	}
	if _, statErr := os.Stat(segment.Path(s.folder(l.Run), a.Segment)); errors.Is(statErr, os.ErrNotExist) && step <= l.Trimmed {
		return nil, where(ErrTrimmed)
	}
	return nil, where(ErrLost.Wrap(err))
}

// fetch reads a payload from the storage service.
func (s *Service) fetch(ctx context.Context, ref string) ([]byte, error) {
	if s.deps.Artifacts == nil {
		return nil, ErrNoArtifacts.With("ref", ref)
	}
	stream, err := s.deps.Artifacts.GetArtifact(ctx, &storagev1.GetArtifactRequest{ContentId: ref})
	if err != nil {
		return nil, err
	}
	var payload []byte
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return payload, nil
		}
		if err != nil {
			return nil, err
		}
		payload = append(payload, part.GetChunk()...)
	}
}

// trim drops the segments that only steps through one need.
func (s *Service) trim(ctx context.Context, run string, through uint64) (freed uint64, err error) {
	t := s.trimmer(run)
	if err := s.update(ctx, run, func(tx Tx) error { return t.record(ctx, tx, through) }); err != nil {
		return 0, err
	}
	return t.remove(ctx)
}
