package daemon

import (
	"bytes"
	"fmt"
	"os"
)

// zombie reports whether a process has ended but was not waited for.
func zombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// pid (name) state ...; the name may hold anything
	rest := bytes.TrimSpace(stat[bytes.LastIndexByte(stat, ')')+1:])
	return len(rest) > 0 && (rest[0] == 'Z' || rest[0] == 'X')
}
