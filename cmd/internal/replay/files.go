package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/libs/blob"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Artifacts reads the artifacts themselves, without a service.
type Artifacts struct{ *blob.CAS }

// Artifact implements Files.
func (f Artifacts) Artifact(ctx context.Context, content, path string) error {
	r, err := f.Open(ctx, content)
	if err != nil {
		return fmt.Errorf("read artifact %s: %w", content, err)
	}
	return errors.Join(write(path, r), r.Close())
}

// Snapshot implements Files.
func (f Artifacts) Snapshot(ctx context.Context, s *snapshotv1.Snapshot, folder string) error {
	for _, file := range s.GetFiles() {
		if !filepath.IsLocal(filepath.FromSlash(file.GetPath())) {
			return fmt.Errorf("snapshot %s names a file outside of its folder: %s", s.GetSnapshotId(), file.GetPath())
		}
		if err := f.Artifact(ctx, file.GetDigest(), filepath.Join(folder, filepath.FromSlash(file.GetPath()))); err != nil {
			return err
		}
	}
	return nil
}

// Services asks running services; they must write to this host's disk.
type Services struct{ *client.Client }

// Artifact implements Files.
func (s Services) Artifact(ctx context.Context, content, path string) error {
	stream, err := s.Artifacts.GetArtifact(ctx, &storagev1.GetArtifactRequest{ContentId: content})
	if err != nil {
		return err
	}
	pipe, into := io.Pipe()
	go func() {
		for {
			part, err := stream.Recv()
			if err != nil {
				_ = into.CloseWithError(err) // io.EOF is the end
				return
			}
			if _, err := into.Write(part.GetChunk()); err != nil {
				return
			}
		}
	}()
	return errors.Join(write(path, pipe), pipe.Close())
}

// Snapshot implements Files.
func (s Services) Snapshot(ctx context.Context, snap *snapshotv1.Snapshot, folder string) error {
	_, err := s.Client.Snapshot.MaterializeSnapshot(ctx, &snapshotv1.MaterializeSnapshotRequest{SnapshotId: snap.GetSnapshotId(), Directory: folder})
	return err
}

func write(path string, r io.Reader) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}
