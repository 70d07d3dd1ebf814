package segment

import (
	"errors"
	"os"
	"syscall"
)

// datasync makes the contents of a file durable, with the metadata that is needed to read them.
func datasync(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		for {
			if failed = syscall.Fdatasync(int(fd)); !errors.Is(failed, syscall.EINTR) {
				return
			}
		}
	})
	return errors.Join(err, failed)
}
