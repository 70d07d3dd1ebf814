// Package tempdir makes temporary folders, and removes those that killed processes left behind.
//
// Each folder has a file `lock`, which its process and the child processes that inherit it have
// locked; the kernel releases the lock when the last of them dies. The file contains the host name:
// some shared file systems do not share locks, so folders of other hosts are not removed.
package tempdir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// Folder is a temporary folder. It is empty except for its lock.
type Folder struct {
	Path string
	lock *os.File
}

// Make makes a folder in parent whose name begins with prefix. It first removes such folders that
// are not locked.
func Make(parent, prefix string) (*Folder, error) {
	sweep(parent, prefix)
	path, err := os.MkdirTemp(parent, prefix)
	if err != nil {
		return nil, err
	}
	f := &Folder{Path: path}
	if err := f.acquire(); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Remove())
	}
	return f, nil
}

// acquire locks the file before it has its final name, so that no other process finds it unlocked.
func (f *Folder) acquire() (err error) {
	before, name := filepath.Join(f.Path, ".lock"), filepath.Join(f.Path, lockName)
	if f.lock, err = os.OpenFile(before, os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return err
	}
	if err := syscall.Flock(int(f.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil //nolint:nilerr // a file system without locks; without the lock file the folder is never removed by another process
	}
	if _, err := f.lock.WriteString(host()); err != nil {
		return err
	}
	return os.Rename(before, name)
}

// host returns the host name; "" if it is unknown, and then no folders are removed.
func host() string {
	name, _ := os.Hostname()
	return name
}

const lockName = "lock"

// Lock returns the lock file. A child process that inherits it keeps the folder locked.
func (f *Folder) Lock() *os.File { return f.lock }

// Remove removes the folder and its content.
func (f *Folder) Remove() error {
	err := os.RemoveAll(f.Path)
	if f.lock != nil {
		err = errors.Join(err, f.lock.Close())
	}
	return err
}

// sweep removes folders of dead processes. Errors are ignored.
func sweep(parent, prefix string) {
	left, _ := filepath.Glob(filepath.Join(quoted(parent), prefix+"*", lockName))
	for _, name := range left {
		if made, err := os.ReadFile(name); err != nil || len(made) == 0 || string(made) != host() {
			continue
		}
		file, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			continue
		}
		if syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			_ = os.RemoveAll(filepath.Dir(name))
		}
		_ = file.Close()
	}
}

// quoted escapes a path for filepath.Glob.
func quoted(path string) string {
	var out []byte
	for _, b := range []byte(path) {
		if b == '*' || b == '?' || b == '[' || b == '\\' {
			out = append(out, '\\')
		}
		out = append(out, b)
	}
	return string(out)
}
