package snapshot

import (
	"context"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Files reads the files of a snapshot.
type Files struct {
	artifacts Artifacts
	snapshot  *Snapshot
}

// Open reads a file by its path. The reader returns an error of the storage service where the bytes
// are not those of the manifest, at the latest at the end. ErrInvalid if the manifest has no such
// file.
func (f Files) Open(ctx context.Context, path string) (io.ReadCloser, error) {
	for _, file := range f.snapshot.GetFiles() {
		if file.GetPath() == path {
			return open(ctx, f.artifacts, file.GetDigest())
		}
	}
	return nil, ErrInvalid.With("path", path).WithMessage("snapshot %s has no file %s", f.snapshot.GetSnapshotId(), path)
}

func open(ctx context.Context, artifacts Artifacts, digest string) (io.ReadCloser, error) {
	ctx, stop := context.WithCancel(ctx)
	stream, err := artifacts.GetArtifact(ctx, &storagev1.GetArtifactRequest{ContentId: digest})
	if err != nil {
		stop()
		return nil, err
	}
	return &download{stream: stream, stop: stop}, nil
}

// download reads the chunks of a stream.
type download struct {
	stream grpc.ServerStreamingClient[storagev1.GetArtifactResponse]
	stop   func()
	rest   []byte
}

func (d *download) Read(p []byte) (int, error) {
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

func (d *download) Close() error {
	d.stop()
	return nil
}

// verify reads every file of a snapshot and returns what is damaged; if nothing is, what the kind
// finds.
func (s *service) verify(ctx context.Context, idOrPrefix string) (*Snapshot, []*Flaw, error) {
	s.files.RLock()
	defer s.files.RUnlock()
	snap, err := s.get(ctx, idOrPrefix)
	if err != nil {
		return nil, nil, err
	}
	handler, err := s.handlers.of(snap.GetKind())
	if err != nil {
		return nil, nil, err
	}
	var flaws []*Flaw
	for _, f := range snap.GetFiles() {
		found, err := s.damage(ctx, f)
		if err != nil {
			return nil, nil, fmt.Errorf("read %s of %s: %w", f.GetPath(), snap.GetSnapshotId(), err)
		}
		flaws = append(flaws, found...)
	}
	if len(flaws) == 0 {
		flaws, err = handler.Verify(ctx, snap, Files{s.Artifacts, snap})
	}
	return snap, flaws, err
}

// damage compares a file with its manifest.
func (s *service) damage(ctx context.Context, f *snapshotv1.SnapshotFile) ([]*Flaw, error) {
	flaw := func(offset, bytes uint64, format string, args ...any) []*Flaw {
		return []*Flaw{{Path: f.GetPath(), Offset: offset, Bytes: bytes, Message: fmt.Sprintf(format, args...)}}
	}
	r, err := open(ctx, s.Artifacts, f.GetDigest())
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	size, hash := uint64(0), id.NewHasher()
	counted := io.TeeReader(r, io.MultiWriter(hash, writerFunc(func(n int) { size += uint64(n) })))
	var corrupt bool
	found, err := blob.Blocks(readerFunc(func(p []byte) (int, error) {
		n, err := counted.Read(p)
		if rpcerr.Reason(err) == "ARTIFACT_CORRUPT" { // all of its bytes were read
			corrupt, err = true, io.EOF
		}
		return n, err
	}))
	switch {
	case rpcerr.Code(err) == codes.NotFound:
		return flaw(0, 0, "the file is missing in the storage service"), nil
	case err != nil:
		return nil, err
	case size < f.GetBytes():
		return flaw(size, 0, "the file ends at byte %d of %d", size, f.GetBytes()), nil
	case size > f.GetBytes():
		return flaw(f.GetBytes(), 0, "the file has %d bytes, %d more than the manifest", size, size-f.GetBytes()), nil
	case !corrupt && hash.ID() == f.GetDigest():
		return nil, nil
	}
	var out []*Flaw
	for _, n := range blob.DamagedBlocks(f.GetBlocks(), found) {
		from := uint64(n) * blob.BlockBytes
		end := min(from+blob.BlockBytes, size)
		out = append(out, flaw(from, end-from, "bytes %d to %d are not those that were stored", from, end)...)
	}
	if len(out) == 0 { // a manifest without checksums of blocks
		out = flaw(0, 0, "the file does not have the digest %s", f.GetDigest())
	}
	return out, nil
}

type writerFunc func(n int)

func (f writerFunc) Write(p []byte) (int, error) {
	f(len(p))
	return len(p), nil
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
