package daemon

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/rollout-rl/rollout/libs/process"
)

// Running is a rolloutd of this host.
type Running struct {
	Info    Info
	Stopped bool // by a signal or a debugger
	Mine    bool // of the caller's user; another may pretend to be of a control plane
}

// OnHost lists the processes of rolloutd on this host that serve, of every state folder that the
// caller may read. A stopped one, which no longer answers, is found by the lock of its folder.
func OnHost() (out []Running) {
	for _, p := range process.Holding("rolloutd", filepath.Base(lockOf(""))) {
		data, err := os.ReadFile(infoFile(filepath.Dir(p.Path)))
		if err != nil {
			continue
		}
		var info Info
		if json.Unmarshal(data, &info) == nil && info.PID == p.PID {
			out = append(out, Running{Info: info, Stopped: p.Stopped, Mine: p.UID == os.Getuid()})
		}
	}
	return out
}
