// Package daemon finds, starts and stops the local rolloutd.
//
// The daemon says where it is in `<state>/rolloutd.json`, written when every target serves. Whoever finds no living daemon
// there starts one; a lock file makes sure that of two who start at a time one does and the other waits.
package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/rollout-rl/rollout/libs/config"
)

// Info is the content of rolloutd.json.
type Info struct {
	PID       int      `json:"pid"`
	GRPC      string   `json:"grpc"`
	Gateway   string   `json:"gateway"`
	NATS      string   `json:"nats"`
	Consul    string   `json:"consul"`
	TokenFile string   `json:"token_file"`
	KeysFile  string   `json:"api_keys_file"`
	CAFile    string   `json:"ca_file,omitempty"` // what it is called with where it speaks TLS
	CertFile  string   `json:"cert_file,omitempty"`
	KeyFile   string   `json:"key_file,omitempty"`
	Version   string   `json:"version"`
	Targets   []string `json:"targets"`
}

// StateDir is the folder of the local mesh: the flag, else what the environment and rolloutd's configuration wish, as rolloutd
// itself finds it.
func StateDir(flag string, environ []string) (string, error) {
	if flag != "" {
		return filepath.Abs(flag)
	}
	return config.StateDir(environ)
}

func infoFile(stateDir string) string { return filepath.Join(stateDir, "rolloutd.json") }

// lockOf is the file that rolloutd has locked for as long as it lives, see lockState there.
func lockOf(stateDir string) string { return filepath.Join(stateDir, "rolloutd.lock") }

// Find returns the living daemon of a state folder, nil where there is none. A file whose process is dead is stale and no
// daemon. Nor is one that names a living process in a folder that nobody owns: after a reboot, or in a copy of the folder, the
// process is somebody else.
func Find(stateDir string) (*Info, error) {
	data, err := os.ReadFile(infoFile(stateDir))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) { // who starts one says that no folder can be made there
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the daemon's file: %w", err)
	}
	var info Info
	if err := json.Unmarshal(data, &info); err != nil || info.PID <= 0 || info.GRPC == "" {
		return nil, nil // a half of a file that a crash left
	}
	if !alive(info.PID) || !owned(stateDir) {
		return nil, nil
	}
	return &info, nil
}

// owned reports whether a rolloutd has the state folder. Where that can't be found out, it says yes.
func owned(stateDir string) bool {
	f, err := os.Open(lockOf(stateDir))
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	defer f.Close()
	return syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB) != nil
}

// alive reports whether a process exists and is no zombie of ours.
func alive(pid int) bool {
	err := syscall.Kill(pid, 0)
	if err != nil && !errors.Is(err, syscall.EPERM) {
		return false
	}
	return !zombie(pid)
}
