//go:build unix

package segment

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// errTaken says that a file is no longer the one that its name stands for.
var errTaken = errors.New("its file was taken for another segment")

// lock takes a file for itself; false where somebody shares it, or it can't be known.
func lock(f *os.File) bool { return flock(f, syscall.LOCK_EX|syscall.LOCK_NB) == nil }

func unlock(f *os.File) error { return flock(f, syscall.LOCK_UN) }

// share keeps an open file from being lent again until it is closed. errTaken where that has happened since it was opened.
func share(f *os.File) error {
	if err := flock(f, syscall.LOCK_SH|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		return errTaken
	} // where files can't be locked none is lent again
	named, err := os.Stat(f.Name())
	if err != nil {
		return err
	}
	mine, err := f.Stat()
	if err != nil {
		return err
	}
	if !os.SameFile(named, mine) {
		return errTaken
	}
	return nil
}

func flock(f *os.File, how int) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		for {
			if failed = syscall.Flock(int(fd), how); !errors.Is(failed, syscall.EINTR) {
				return
			}
		}
	})
	if err = errors.Join(err, failed); err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return nil
}
