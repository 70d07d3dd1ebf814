package criu

import (
	"errors"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/checkpoint"
)

// Logs of CRIU 4.2.1.
func TestAnErrorQuotesTheDecisiveLine(t *testing.T) {
	t.Parallel()
	const before = "Warn  (criu/kerndat.c:1642): CRIU was built without libnftables support\nError (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
	for name, one := range map[string]struct{ log, reason, message, fix string }{
		"size": {"  5202: Error (criu/files-reg.c:2175): File tmp/opened has bad size 12 (expect 9)\n  5202: Error (criu/files.c:1221): Unable to open fd=4 id=0x10\nError (criu/cr-restore.c:2331): Restoring FAILED.\n",
			checkpoint.ReasonFiles, "not saved: CRIU: File tmp/opened has bad size 12 (expect 9)", "same versions at the same paths"},
		"missing":      {"  5202: Error (criu/files-reg.c:2325): Can't open file tmp/opened on restore: No such file or directory\n", checkpoint.ReasonFiles, "Can't open file tmp/opened", "copy the file"},
		"capability":   {"Error (criu/libnetlink.c:84): -1 reported by netlink: Operation not permitted\n", checkpoint.ReasonUnavailable, "netlink: Operation not permitted", "run it as root"},
		"capabilities": {"CRIU needs to have the CAP_SYS_ADMIN or the CAP_CHECKPOINT_RESTORE capability: \nsetcap ...\n", checkpoint.ReasonUnavailable, "or the CAP_CHECKPOINT_RESTORE capability", "run it as root"},
		"loopback":     {"Error (criu/kerndat.c:732): Unable to connect a socket: Network is unreachable\n", checkpoint.ReasonDump, "Network is unreachable", "ip link set lo up"},
		"box":          {"(00.066112) Error (criu/mount.c:753): mnt: 85:./dev/shm doesn't have a proper root mount\n(00.066255) Error (criu/cr-dump.c:1975): Dumping FAILED.\n", checkpoint.ReasonDump, "proper root mount", "mounts of the host"},
		"another":      {"(00.1) Error (criu/x.c:1): something else\n", checkpoint.ReasonDump, "CRIU: something else", "docs/reliability.md"},
		"silent":       {"", checkpoint.ReasonDump, "CRIU ended with exit status 1 and wrote no reason", "criu check"},
	} {
		log := before + one.log
		if name == "silent" {
			log = before
		}
		got := failure(checkpoint.ReasonDump, "not saved", log, errors.New("exit status 1"))
		if got.Reason != one.reason || !strings.Contains(got.Message, one.message) || !strings.Contains(got.Fix, one.fix) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
