package files

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/rollout-rl/rollout/libs/blob"
)

// Put implements blob.Writer.
func (s *Store) Put(ctx context.Context, key string, r io.Reader) (blob.Info, error) {
	path, err := s.Path(key)
	if err != nil {
		return blob.Info{}, err
	}
	if _, err := os.Lstat(path); err == nil {
		return blob.Info{}, mapError("put", key, fs.ErrExist)
	}
	tmp, err := os.CreateTemp(s.Spool(), "put-*")
	if err != nil {
		return blob.Info{}, mapError("put", key, err)
	}
	defer os.Remove(tmp.Name())
	defer tmp.Close()
	if _, err := io.Copy(tmp, contextReader{ctx, r}); err != nil {
		return blob.Info{}, mapError("put", key, err)
	}
	if err := tmp.Sync(); err != nil {
		return blob.Info{}, mapError("put", key, err)
	}
	if err := publish(tmp.Name(), path); err != nil {
		return blob.Info{}, mapError("put", key, err)
	}
	return s.Stat(ctx, key)
}

// PutFile implements blob.FilePutter: the file is fsynced and hard-linked, and copied only across
// file systems.
func (s *Store) PutFile(ctx context.Context, key, source string) (blob.Info, error) {
	path, err := s.Path(key)
	if err != nil {
		return blob.Info{}, err
	}
	f, err := os.Open(source)
	if err != nil {
		return blob.Info{}, err // not mapError, because the source is missing
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return blob.Info{}, mapError("put", key, err)
	}
	err = publish(source, path)
	if errors.Is(err, syscall.EXDEV) || errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EMLINK) {
		return s.Put(ctx, key, f)
	}
	if err != nil {
		return blob.Info{}, mapError("put", key, err)
	}
	return s.Stat(ctx, key)
}

// publish links a finished file to its name, and makes the name durable.
func publish(from, to string) error {
	dir := filepath.Dir(to)
	if err := mkdirDurable(dir); err != nil {
		return err
	}
	if err := os.Link(from, to); err != nil {
		return err
	}
	return syncDir(dir)
}

// mkdirDurable is like MkdirAll, and fsyncs the parents of the folders that it creates.
func mkdirDurable(dir string) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	parent := filepath.Dir(dir)
	if err := mkdirDurable(parent); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncDir(parent)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// contextReader ends a copy when its context does.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
