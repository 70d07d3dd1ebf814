package snapshot

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/rollout-rl/rollout/libs/id"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Folder is the folder that the files of a new snapshot are written into. It is deleted afterwards.
type Folder struct{ Dir string }

// Write writes a file and returns its entry in the manifest. path is relative, with slashes. The
// file has its name once it is durable.
func (f Folder) Write(path string, fill func(io.Writer) error) (_ *snapshotv1.SnapshotFile, err error) {
	name := filepath.Join(f.Dir, filepath.FromSlash(path))
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	file, err := os.CreateTemp(filepath.Dir(name), ".new-*")
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(file.Name()))
		}
	}()
	hash := id.NewHasher()
	out := bufio.NewWriterSize(io.MultiWriter(file, hash), 1<<20)
	err = fill(out)
	if err = errors.Join(err, out.Flush()); err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, err
	}
	if err := os.Rename(file.Name(), name); err != nil {
		return nil, err
	}
	return &snapshotv1.SnapshotFile{Path: path, Digest: hash.ID()}, nil
}
