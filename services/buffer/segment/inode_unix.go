//go:build unix

package segment

import (
	"errors"
	"os"
	"syscall"
)

func inodeOf(f *os.File) (uint64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, errors.New("the file system has no inodes")
	}
	return stat.Ino, nil
}
