package storage

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/blob"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

const chunkBytes = 1 << 20

// PutArtifact implements the contract.
func (s *Server) PutArtifact(stream grpc.ClientStreamingServer[storagev1.PutArtifactRequest, storagev1.PutArtifactResponse]) error {
	from := &uploads{stream: stream, admit: s.deps.Store.Admit}
	content, size, err := s.deps.Artifacts.Put(stream.Context(), from)
	if err != nil {
		return err
	}
	if err := s.deps.Store.Own(stream.Context(), from.run, content, from.by, func() error { return s.deps.Artifacts.Delete(stream.Context(), content) }); err != nil {
		return err
	}
	return stream.SendAndClose(&storagev1.PutArtifactResponse{ContentId: content, Bytes: uint64(size)})
}

// uploads reads the chunks of a stream.
type uploads struct {
	stream grpc.ClientStreamingServer[storagev1.PutArtifactRequest, storagev1.PutArtifactResponse]
	rest   []byte
	// admit refuses, before bytes are stored, what a former leader decided, and what is for a deleted
	// run. The transaction that records the owner of the bytes compares again.
	admit func(ctx context.Context, run string, by *fencev1.Fence) error
	run   string // of the first message
	by    *fencev1.Fence
	begun bool
}

func (u *uploads) Read(p []byte) (int, error) {
	for len(u.rest) == 0 {
		req, err := u.stream.Recv()
		if err != nil {
			return 0, err
		}
		if !u.begun {
			u.run, u.by, u.begun = req.GetRunId(), req.GetFence(), true
			if err := u.admit(u.stream.Context(), u.run, u.by); err != nil {
				return 0, err
			}
		}
		u.rest = req.GetChunk()
	}
	n := copy(p, u.rest)
	u.rest = u.rest[n:]
	return n, nil
}

// GetArtifact implements the contract.
func (s *Server) GetArtifact(req *storagev1.GetArtifactRequest, stream grpc.ServerStreamingServer[storagev1.GetArtifactResponse]) error {
	r, err := s.open(stream.Context(), req)
	if err != nil {
		return typed(err, req.GetContentId())
	}
	defer func() { _ = r.Close() }()
	buffer := make([]byte, chunkBytes)
	for {
		n, err := io.ReadFull(r, buffer)
		if n > 0 {
			if err := stream.Send(&storagev1.GetArtifactResponse{Chunk: buffer[:n]}); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return typed(err, req.GetContentId())
		}
	}
}

// open opens an artifact. From its beginning the bytes are verified while they are read.
func (s *Server) open(ctx context.Context, req *storagev1.GetArtifactRequest) (io.ReadCloser, error) {
	if req.GetOffset() == 0 {
		return s.deps.Artifacts.Open(ctx, req.GetContentId())
	}
	return s.deps.Artifacts.OpenRange(ctx, req.GetContentId(), blob.Range{Offset: int64(min(req.GetOffset(), math.MaxInt64))})
}

// ImportArtifacts implements the contract.
func (s *Server) ImportArtifacts(ctx context.Context, req *storagev1.ImportArtifactsRequest) (*storagev1.ImportArtifactsResponse, error) {
	resp := &storagev1.ImportArtifactsResponse{}
	if err := s.deps.Store.Admit(ctx, "", req.GetFence()); err != nil {
		return nil, err
	}
	for _, f := range req.GetFiles() {
		if !filepath.IsAbs(f.GetPath()) {
			return nil, ErrPath.With("path", f.GetPath())
		}
		content, size, err := s.importFile(ctx, f)
		if err != nil {
			return nil, err
		}
		if f.GetContentId() != "" && f.GetContentId() != content {
			return nil, ErrMismatch.With("path", f.GetPath()).With("announced", f.GetContentId()).With("found", content)
		}
		if err := s.deps.Store.Own(ctx, "", content, req.GetFence(), nil); err != nil {
			return nil, err
		}
		blocks, err := blocks(f.GetPath())
		if err != nil {
			return nil, err
		}
		resp.Artifacts = append(resp.Artifacts, &storagev1.ArtifactInfo{ContentId: content, Bytes: uint64(size), Exists: true, Blocks: blocks})
	}
	return resp, nil
}

// blocks returns the checksums of the blocks of a file; nil if it does not exist.
func blocks(path string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	defer func() { _ = f.Close() }()
	return blob.Blocks(f)
}

// importFile stores a file. A file that does not exist needs an artifact with its content id.
func (s *Server) importFile(ctx context.Context, f *storagev1.LocalFile) (content string, size int64, err error) {
	content, size, err = s.deps.Artifacts.PutFile(ctx, f.GetPath())
	if errors.Is(err, fs.ErrNotExist) {
		info, unknown := s.deps.Artifacts.Stat(ctx, f.GetContentId())
		if unknown == nil {
			return f.GetContentId(), info.Size, nil
		}
		err = ErrNoFile.With("path", f.GetPath())
	}
	if err != nil {
		return "", 0, fmt.Errorf("import %s: %w", f.GetPath(), err)
	}
	return content, size, nil
}

// ExportArtifacts implements the contract.
func (s *Server) ExportArtifacts(ctx context.Context, req *storagev1.ExportArtifactsRequest) (*storagev1.ExportArtifactsResponse, error) {
	for _, f := range req.GetFiles() {
		if !filepath.IsAbs(f.GetPath()) {
			return nil, ErrPath.With("path", f.GetPath())
		}
		if err := s.export(ctx, f); err != nil {
			return nil, typed(err, f.GetContentId())
		}
	}
	return &storagev1.ExportArtifactsResponse{}, nil
}

// export writes an artifact to a temporary file and renames the file once it is verified.
func (s *Server) export(ctx context.Context, f *storagev1.LocalFile) error {
	path, folder, mode := f.GetPath(), fs.FileMode(0o755), fs.FileMode(0o644)
	if f.GetPrivate() {
		folder, mode = 0o700, 0o600
	}
	r, err := s.deps.Artifacts.Open(ctx, f.GetContentId())
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	if err := os.MkdirAll(filepath.Dir(path), folder); err != nil {
		return err
	}
	staged, err := os.CreateTemp(filepath.Dir(path), ".export-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(staged.Name()) }()
	out := bufio.NewWriterSize(staged, chunkBytes)
	_, err = io.Copy(out, r)
	if err := errors.Join(err, out.Flush(), staged.Chmod(mode), staged.Close()); err != nil {
		return err
	}
	return os.Rename(staged.Name(), path)
}

// StatArtifacts implements the contract.
func (s *Server) StatArtifacts(ctx context.Context, req *storagev1.StatArtifactsRequest) (*storagev1.StatArtifactsResponse, error) {
	resp := &storagev1.StatArtifactsResponse{}
	for _, content := range req.GetContentIds() {
		info, err := s.deps.Artifacts.Stat(ctx, content)
		if err != nil && !errors.Is(err, blob.ErrNotFound) {
			return nil, err
		}
		resp.Artifacts = append(resp.Artifacts, &storagev1.ArtifactInfo{ContentId: content, Bytes: uint64(info.Size), Exists: err == nil})
	}
	return resp, nil
}

// DeleteArtifacts implements the contract.
func (s *Server) DeleteArtifacts(ctx context.Context, req *storagev1.DeleteArtifactsRequest) (*storagev1.DeleteArtifactsResponse, error) {
	if err := s.deleteArtifacts(ctx, req.GetRunId(), req.GetContentIds(), req.GetFence()); err != nil {
		return nil, err
	}
	return &storagev1.DeleteArtifactsResponse{}, nil
}

// deleteArtifacts deletes what only this owner has stored: a run, or "" for what belongs to no run.
// A run deletes nothing that was not stored for it. The record of the owner is deleted after the
// bytes, so that a repeated call finds them.
func (s *Server) deleteArtifacts(ctx context.Context, run string, contents []string, by *fencev1.Fence) error {
	for _, content := range contents {
		err := s.deps.Store.Disown(ctx, run, content, by, func() error { return s.deps.Artifacts.Delete(ctx, content) })
		if err != nil {
			return err
		}
	}
	return nil
}

// deletePage is the number of artifacts that are deleted at a time.
const deletePage = 256

// DeleteRun implements the contract.
func (s *Server) DeleteRun(ctx context.Context, req *storagev1.DeleteRunRequest) (*storagev1.DeleteRunResponse, error) {
	if err := s.deps.Store.DeleteRun(ctx, req.GetRunId(), req.GetFence()); err != nil {
		return nil, err
	}
	for {
		owned, err := s.deps.Store.Owned(ctx, req.GetRunId(), deletePage)
		if err != nil {
			return nil, err
		}
		if len(owned) == 0 {
			return &storagev1.DeleteRunResponse{}, nil
		}
		if err := s.deleteArtifacts(ctx, req.GetRunId(), owned, req.GetFence()); err != nil {
			return nil, err
		}
	}
}

// typed converts the errors of the blob port.
func typed(err error, content string) error {
	switch {
	case errors.Is(err, blob.ErrNotFound):
		return ErrNotFound.With("content_id", content)
	case errors.Is(err, blob.ErrCorrupt):
		return ErrCorrupt.With("content_id", content)
	}
	return err
}
