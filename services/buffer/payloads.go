package buffer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// chunkBytes is the approximate size of one message of ReadPayloads.
const chunkBytes = 1 << 20

// payloads reads and deletes payloads.
type payloads struct {
	cfg       Config
	store     ledger.Store
	blobs     segment.Blobs // nil: segments are local
	artifacts Artifacts     // nil: not reachable
}

// bucket of a run; nil if segments are local.
func (p *payloads) bucket(run string) *segment.Bucket {
	return segment.NewBucket(p.blobs, run, p.cfg.folder(run))
}

// read passes the payloads of a step's batch to send, in order and in chunks. ledger.ErrNoBatch,
// ErrTrimmed, ErrLost.
func (p *payloads) read(ctx context.Context, run string, step uint64, send func([][]byte) error) (err error) {
	var samples []ledger.Sample
	var of ledger.Ledger
	err = p.store.View(ctx, run, func(r ledger.Reader) error {
		of = *r.Ledger()
		known, err := r.Step(ctx, step)
		if err == nil && known == nil {
			err = ledger.ErrNoBatch.With("step", fmt.Sprint(step))
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
	files := segment.NewReader(p.cfg.folder(run))
	defer func() { err = errors.Join(err, files.Close()) }()
	var chunk [][]byte
	size := 0
	for i := range samples {
		payload, err := p.one(ctx, files, &of, step, &samples[i])
		if err != nil {
			return err
		}
		if size > 0 && size+len(payload) > chunkBytes {
			if err := send(chunk); err != nil {
				return err
			}
			chunk, size = nil, 0
		}
		chunk, size = append(chunk, payload), size+len(payload)
	}
	if len(chunk) == 0 {
		return nil
	}
	return send(chunk)
}

// one reads and verifies the payload of one sample.
func (p *payloads) one(ctx context.Context, files *segment.Reader, l *ledger.Ledger, step uint64, a *ledger.Sample) ([]byte, error) {
	rows := l.Config.GetRows()
	locate := func(e *rpcerr.Error) *rpcerr.Error {
		return e.With("run", l.Run).With("group", fmt.Sprintf("%d/%d", a.Position/rows, a.Position%rows)).With("sample", fmt.Sprint(a.Sample)).
			With("segment", fmt.Sprint(a.Segment)).With("offset", fmt.Sprint(a.Offset)).With("ref", a.Ref)
	}
	if a.Segment == 0 {
		payload, err := p.artifact(ctx, a.Ref)
		switch {
		case err != nil:
			return nil, fmt.Errorf("download payload %s: %w", a.Ref, err)
		case segment.CRC(payload) != a.CRC:
			return nil, locate(ErrLost)
		}
		return payload, nil
	}
	place := segment.Place{Segment: a.Segment, Offset: a.Offset, Length: a.Length}
	payload, err := files.Read(place, a.CRC)
	if bucket := p.bucket(l.Run); err != nil && bucket != nil { // the local file is a cache: missing on another host, or damaged
		if failed := bucket.Download(ctx, a.Segment); failed == nil {
			files.Forget(a.Segment)
			payload, err = files.Read(place, a.CRC)
		} else if rpcerr.Code(failed) == codes.Unavailable {
			return nil, failed
		} else {
			err = errors.Join(err, failed)
		}
	}
	if err == nil {
		return payload, nil
	}
	if _, missing := os.Stat(segment.Path(p.cfg.folder(l.Run), a.Segment)); errors.Is(missing, os.ErrNotExist) && step <= l.Trimmed {
		return nil, locate(ErrTrimmed)
	}
	return nil, locate(ErrLost.Wrap(err))
}

// artifact downloads a payload from the storage service.
func (p *payloads) artifact(ctx context.Context, ref string) ([]byte, error) {
	if p.artifacts == nil {
		return nil, ErrNoArtifacts.With("ref", ref)
	}
	stream, err := p.artifacts.GetArtifact(ctx, &storagev1.GetArtifactRequest{ContentId: ref})
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

// delete deletes the files and blobs of trimmed segments, and returns the number of local bytes
// that were freed. A file that a crash leaves is deleted when the ledger is opened.
func (p *payloads) delete(ctx context.Context, run string, t ledger.Trimmed) (freed uint64, err error) {
	if bucket := p.bucket(run); bucket != nil && len(t.Segments) > 0 {
		keep := map[uint32]bool{}
		for _, g := range t.Segments {
			keep[g.Number] = !g.Trimmed
		}
		if err := bucket.Delete(ctx, t.Segments[len(t.Segments)-1].Number, keep); err != nil {
			return 0, err
		}
	}
	for _, number := range t.Deleted {
		crashpoint.Here("buffer/trimmed") // the ledger has dropped the segment, its file exists
		n, err := segment.Remove(p.cfg.folder(run), number)
		if err != nil {
			return freed, err
		}
		freed += n
	}
	return freed, nil
}
