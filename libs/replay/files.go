package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/trainstate"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Artifacts reads artifacts from their store.
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
		path := filepath.FromSlash(file.GetPath())
		if !filepath.IsLocal(path) {
			return fmt.Errorf("snapshot %s names a file outside of its folder: %s", s.GetSnapshotId(), file.GetPath())
		}
		if err := f.Artifact(ctx, file.GetDigest(), filepath.Join(folder, path)); err != nil {
			return err
		}
	}
	return nil
}

// Services reads from running services. The snapshot service must share a disk with this process.
type Services struct {
	Snapshots snapshotv1.SnapshotServiceClient
	Artifacts storagev1.ArtifactServiceClient
}

// Artifact implements Files.
func (s Services) Artifact(ctx context.Context, content, path string) error {
	stream, err := s.Artifacts.GetArtifact(ctx, &storagev1.GetArtifactRequest{ContentId: content})
	if err != nil {
		return err
	}
	out, in := io.Pipe()
	go func() {
		for {
			part, err := stream.Recv()
			if err != nil {
				_ = in.CloseWithError(err) // io.EOF is the end
				return
			}
			if _, err := in.Write(part.GetChunk()); err != nil {
				return
			}
		}
	}()
	return errors.Join(write(path, out), out.Close())
}

// Snapshot implements Files.
func (s Services) Snapshot(ctx context.Context, snap *snapshotv1.Snapshot, folder string) error {
	_, err := s.Snapshots.MaterializeSnapshot(ctx, &snapshotv1.MaterializeSnapshotRequest{
		SnapshotId: snap.GetSnapshotId(), Directory: folder, Paths: trainstate.Paths(snap),
	})
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
