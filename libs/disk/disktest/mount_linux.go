package disktest

import "syscall"

// mount mounts an empty file system in memory at dir.
func mount(dir, size string) (unmount func() error, err error) {
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		return nil, err
	}
	return func() error { return syscall.Unmount(dir, syscall.MNT_DETACH) }, nil
}
