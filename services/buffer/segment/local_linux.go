package segment

import (
	"slices"
	"syscall"
)

// locals are the file systems whose locks hold for everyone who can map their files: ext2 to 4, XFS, Btrfs, F2FS, ZFS, tmpfs, overlay. The
// client's rollout/client/buffer/segment.py names the same.
var locals = []int64{0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0x01021994, 0x794C7630}

// onLocal reports whether a folder is on such a file system.
func onLocal(dir string) bool {
	var st syscall.Statfs_t
	return syscall.Statfs(dir, &st) == nil && slices.Contains(locals, int64(st.Type)) //nolint:unconvert // 32 bits on some machines
}
