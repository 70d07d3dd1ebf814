package criu

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/rollout-rl/rollout/libs/checkpoint"
)

var line = regexp.MustCompile(`^(?:\([0-9.]+\)\s+)?(?:\d+: )?Error \([^)]*\): (.*)$`)

// aside are errors of CRIU that are never the reason of a failure: its attempt to raise the limit
// of open files, and the summary at the end.
var aside = []string{"rlimit: Can't setup", "Dumping FAILED", "Restoring FAILED"}

// decisive returns the line of a log that says why CRIU failed: the first error, which those after
// it follow from. Without an error it is the first line that is not a warning.
func decisive(log string) string {
	plain := ""
	for text := range strings.Lines(log) {
		found := line.FindStringSubmatch(strings.TrimSpace(text))
		if found == nil {
			if text = strings.TrimSpace(text); plain == "" && !strings.HasPrefix(text, "Warn") {
				plain = strings.TrimSuffix(text, ":")
			}
			continue
		}
		ignored := false
		for _, prefix := range aside {
			ignored = ignored || strings.HasPrefix(found[1], prefix)
		}
		if !ignored {
			return found[1]
		}
	}
	return plain
}

// known are errors of CRIU with their reason and their fix.
var known = []struct {
	pattern     *regexp.Regexp
	reason, fix string
}{
	{regexp.MustCompile(`has bad (size|mode|build-ID)|[Bb]uild-ID`), checkpoint.ReasonFiles, "install the files of the host that saved the process: the same versions at the same paths"},
	{regexp.MustCompile(`(Can't open|open|stat|Can't lookup).*(No such file|[Nn]o such)`), checkpoint.ReasonFiles, "copy the file from the host that saved the process, to the same path"},
	{regexp.MustCompile(`Unable to connect a socket: Network is unreachable`), "", "start the loopback device of the network namespace, which CRIU needs: `ip link set lo up`"},
	{regexp.MustCompile(`[Pp]ermission|not permitted|CAP_|privileges`), checkpoint.ReasonUnavailable, "run it as root; in a container, with all capabilities and without a filter of system calls"},
	{regexp.MustCompile(`half of stream|[Ee]xternal socket|[Rr]unaway socket`), "", "let the process close its Unix sockets to other processes first"},
	{regexp.MustCompile(`/dev/nvidia|/dev/kfd|/dev/dri`), "", "only processes without a GPU can be saved"},
	{regexp.MustCompile(`io_uring|seccomp notify|[Uu]nknown.*(fd|file)|unsupported`), "", "the process uses a kernel feature that CRIU does not save"},
	{regexp.MustCompile(`proper root mount`), "", "the process has separate mounts; only processes with the mounts of the host can be saved"},
}

// failure is the error of a failed call of CRIU, with the decisive line of its log.
func failure(reason, what, log string, err error) *checkpoint.Error {
	text := decisive(log)
	if text == "" {
		return checkpoint.Fail(reason, "see its log with `criu check --all`", "%s: CRIU ended with %v and wrote no reason", what, err)
	}
	for _, k := range known {
		if k.pattern.MatchString(text) {
			if k.reason != "" {
				reason = k.reason
			}
			return checkpoint.Fail(reason, k.fix, "%s: CRIU: %s", what, text)
		}
	}
	return checkpoint.Fail(reason, fmt.Sprintf("see docs/%s for what can be saved", page), "%s: CRIU: %s", what, text)
}

const page = "reliability.md"
