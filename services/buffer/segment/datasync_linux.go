package segment

import (
	"errors"
	"os"
	"syscall"
)

// datasync makes the bytes of a file durable, and of its metadata what is needed to read them.
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

// startWriting lets the kernel begin to write a range of a file to the disk, and does not wait for it: a sync then finds less to do.
func startWriting(f *os.File, offset, length uint64) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = syscall.SyncFileRange(int(fd), int64(offset), int64(length), syncFileRangeWrite)
	})
	if errors.Is(failed, syscall.EINVAL) || errors.Is(failed, syscall.ENOSYS) || errors.Is(failed, syscall.EINTR) {
		failed = nil // no such range or no such call; the sync does it all
	}
	return errors.Join(err, failed)
}

// syncFileRangeWrite is SYNC_FILE_RANGE_WRITE.
const syncFileRangeWrite = 2
