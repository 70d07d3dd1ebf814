package daemon

import (
	"bytes"
	"fmt"
	"os"
	"strings"
)

// zombie reports whether a process has ended but was not waited for.
func zombie(pid int) bool { return strings.ContainsRune("ZX", state(pid)) }

// stopped reports whether a process is stopped by a signal or a debugger.
func stopped(pid int) bool { return strings.ContainsRune("Tt", state(pid)) }

// state is the state of a process, a letter of proc(5); ' ' if it is not known.
func state(pid int) rune {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ' '
	}
	// pid (name) state ...; the name may hold anything
	rest := bytes.TrimSpace(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(rest) == 0 {
		return ' '
	}
	return rune(rest[0])
}
