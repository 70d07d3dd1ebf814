// Package tempdir makes folders for work that is thrown away, and removes those that a killed process left behind.
//
// Each holds a file `lock` that its process has locked, and whoever inherits it; the kernel lets go when the last of them dies.
// The file names the host, as some file systems that several share keep their locks from each other: those of others stay.
package tempdir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// Folder is a new, empty folder, but for its lock.
type Folder struct {
	Path string
	lock *os.File
}

// Make removes the folders in parent that begin with prefix and that nobody holds, and makes another.
func Make(parent, prefix string) (*Folder, error) {
	sweep(parent, prefix)
	path, err := os.MkdirTemp(parent, prefix)
	if err != nil {
		return nil, err
	}
	f := &Folder{Path: path}
	if err := f.hold(); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Remove())
	}
	return f, nil
}

// hold locks the file before it has its name: nobody finds one that is not held yet.
func (f *Folder) hold() (err error) {
	before, name := filepath.Join(f.Path, ".lock"), filepath.Join(f.Path, lockName)
	if f.lock, err = os.OpenFile(before, os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return err
	}
	if err := syscall.Flock(int(f.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil //nolint:nilerr // a file system without locks: such a folder is never taken for one that is left
	}
	if _, err := f.lock.WriteString(host()); err != nil {
		return err
	}
	return os.Rename(before, name)
}

// host names this machine; "" where it has no name, and then nothing is swept.
func host() string {
	name, _ := os.Hostname()
	return name
}

const lockName = "lock"

// Lock is what a child process inherits that works in the folder, so that it is held for as long as the child lives.
func (f *Folder) Lock() *os.File { return f.lock }

// Remove removes the folder with all that is in it.
func (f *Folder) Remove() error {
	err := os.RemoveAll(f.Path)
	if f.lock != nil {
		err = errors.Join(err, f.lock.Close())
	}
	return err
}

// sweep removes what dead processes left. What can't be removed stays: it is in nobody's way.
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

// quoted is a path as a pattern that matches it alone.
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
