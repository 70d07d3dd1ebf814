package crashtest

import "golang.org/x/sys/unix"

var legacy = map[uint64]string{
	unix.SYS_OPEN: "open", unix.SYS_MKDIR: "mkdir", unix.SYS_UNLINK: "unlink", unix.SYS_RMDIR: "rmdir",
	unix.SYS_LINK: "link", unix.SYS_RENAME: "rename",
}
