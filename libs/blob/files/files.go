// Package files stores blobs as files below one directory. A key is a relative path.
//
// A blob is written to a temporary file, fsynced, and hard-linked to its name, which fails if the
// name exists. Then the directory is fsynced. So a blob exists completely or not at all, also after
// a power cut.
package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/libs/blob"
)

const tmpDir = ".tmp" // keys can't start with a dot

// Store is a blob.Store and blob.FilePutter.
type Store struct{ root string }

// leftover is the age after which a temporary file must be from a crash, and not from another
// running process.
const leftover = time.Hour

// Open creates root (mode 0700) if it does not exist, and removes temporary files that are more
// than an hour old.
func Open(root string) (*Store, error) {
	tmp := filepath.Join(root, tmpDir)
	if err := os.MkdirAll(tmp, 0o700); err != nil {
		return nil, fmt.Errorf("open blob directory: %w", err)
	}
	entries, err := os.ReadDir(tmp)
	if err != nil {
		return nil, fmt.Errorf("open blob directory: %w", err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > leftover {
			_ = os.RemoveAll(filepath.Join(tmp, e.Name())) // remaining files are removed at the next start
		}
	}
	return &Store{root: root}, nil
}

// Path is the file of a blob, for readers on this host that map it. It must not be written to.
func (s *Store) Path(key string) (string, error) {
	if err := blob.CheckKey(key); err != nil {
		return "", err
	}
	return filepath.Join(s.root, filepath.FromSlash(key)), nil
}

// Spool is a directory on the store's file system for files that are to become blobs.
func (s *Store) Spool() string { return filepath.Join(s.root, tmpDir) }

// Get implements blob.Reader.
func (s *Store) Get(_ context.Context, key string, r blob.Range) (io.ReadCloser, error) {
	path, err := s.Path(key)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, mapError("get", key, err)
	}
	info, err := f.Stat()
	switch {
	case err != nil:
	case info.IsDir():
		err = fs.ErrNotExist
	case r.Offset < 0 || r.Length < 0 || r.Offset > info.Size():
		err = blob.ErrBadRange.With("key", key)
	case r.Offset > 0:
		_, err = f.Seek(r.Offset, io.SeekStart)
	}
	if err != nil {
		f.Close()
		return nil, mapError("get", key, err)
	}
	if r.Length == 0 {
		return f, nil
	}
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(f, r.Length), f}, nil
}

// Stat implements blob.Reader.
func (s *Store) Stat(_ context.Context, key string) (blob.Info, error) {
	path, err := s.Path(key)
	if err != nil {
		return blob.Info{}, err
	}
	info, err := os.Stat(path)
	if err == nil && info.IsDir() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return blob.Info{}, mapError("stat", key, err)
	}
	return blob.Info{Key: key, Size: info.Size(), Modified: info.ModTime().UTC()}, nil
}

// List implements blob.Reader. It reads the names below the deepest folder of prefix, then yields.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		infos, err := s.list(ctx, prefix)
		if err != nil {
			yield(blob.Info{}, fmt.Errorf("list blobs under %q: %w", prefix, err))
			return
		}
		for _, info := range infos {
			if !yield(info, nil) {
				return
			}
		}
	}
}

func (s *Store) list(ctx context.Context, prefix string) ([]blob.Info, error) {
	folder := ""
	if i := strings.LastIndexByte(prefix, '/'); i >= 0 {
		folder = prefix[:i]
		if err := blob.CheckKey(folder); err != nil {
			return nil, err
		}
	}
	var infos []blob.Info
	err := filepath.WalkDir(filepath.Join(s.root, filepath.FromSlash(folder)), func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // the folder does not exist, or was removed during the walk
			return nil
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(s.root, path)
		if err != nil {
			return err
		}
		key := filepath.ToSlash(rel)
		if d.IsDir() {
			if d.Name() == tmpDir {
				return fs.SkipDir
			}
			return ctx.Err()
		}
		info, err := d.Info()
		if err == nil && strings.HasPrefix(key, prefix) {
			infos = append(infos, blob.Info{Key: key, Size: info.Size(), Modified: info.ModTime().UTC()})
		}
		return nil
	})
	sort.Slice(infos, func(i, j int) bool { return infos[i].Key < infos[j].Key })
	return infos, err
}

// Delete implements blob.Writer.
func (s *Store) Delete(_ context.Context, key string) error {
	path, err := s.Path(key)
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return mapError("delete", key, err)
	}
	return nil
}

func mapError(op, key string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = blob.ErrNotFound
	case errors.Is(err, fs.ErrExist):
		err = blob.ErrExists
	}
	return fmt.Errorf("%s blob %s: %w", op, key, err)
}
