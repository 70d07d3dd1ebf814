// Package daemon finds, starts and stops the local rolloutd.
//
// The daemon writes its addresses to `<state>/rolloutd.json` when all its targets serve. A lock
// file ensures that of two processes that start a daemon at the same time, one starts it and the
// other waits.
package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"syscall"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/exit"
)

// Info is the content of rolloutd.json.
type Info struct {
	PID       int      `json:"pid"`
	GRPC      string   `json:"grpc"`
	Gateway   string   `json:"gateway"`
	NATS      string   `json:"nats"`
	Consul    string   `json:"consul"`
	TokenFile string   `json:"token_file"`
	CAFile    string   `json:"ca_file,omitempty"` // with which clients call it if it uses TLS
	CertFile  string   `json:"cert_file,omitempty"`
	KeyFile   string   `json:"key_file,omitempty"`
	Version   string   `json:"version"`
	Targets   []string `json:"targets"`
}

// StateDir returns the state folder: flag, else the one that rolloutd itself would use.
func StateDir(flag string, environ []string) (string, error) {
	if flag != "" {
		return filepath.Abs(flag)
	}
	return config.StateDir(environ)
}

func infoFile(stateDir string) string { return filepath.Join(stateDir, "rolloutd.json") }

// lockOf returns the file that rolloutd locks while it runs.
func lockOf(stateDir string) string { return filepath.Join(stateDir, "rolloutd.lock") }

// Find returns the running daemon of a state folder, or nil. A file is stale if its process is
// dead, or if the folder is not locked: after a reboot, or in a copy of the folder, the process id
// belongs to another program.
func Find(stateDir string) (*Info, error) {
	data, err := os.ReadFile(infoFile(stateDir))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) { // an invalid folder is reported when a daemon is started
		return nil, nil
	}
	if err != nil {
		return nil, refused(stateDir, fmt.Errorf("read the runtime file of the daemon: %w", err))
	}
	var info Info
	if err := json.Unmarshal(data, &info); err != nil || info.PID <= 0 || info.GRPC == "" {
		return nil, nil // an incomplete file
	}
	if !alive(info.PID) || !locked(stateDir) {
		return nil, nil
	}
	return &info, nil
}

// Silent explains an error of calling a daemon that runs: its process may be stopped.
func (i *Info) Silent(stateDir string, err error) error {
	var known *exit.Error
	if !errors.As(err, &known) || known.Code != exit.Unavailable || known.Reason != "" {
		return err
	}
	if stopped(i.PID) {
		return &exit.Error{
			Code: exit.Unavailable, Reason: "DAEMON_STOPPED", Fix: fmt.Sprintf("continue it: `kill -CONT %d`; its runs continue too", i.PID),
			Err: fmt.Errorf("the local daemon does not answer: its process (rolloutd, pid %d) is stopped by a signal or a debugger", i.PID),
		}
	}
	return &exit.Error{
		Code: exit.Unavailable, Reason: "DAEMON_SILENT",
		Fix: fmt.Sprintf("see its log (%s); `rollout daemon stop --now` ends it, and `rollout run --resume RUN` then continues a run", LogFile(stateDir)),
		Err: fmt.Errorf("the local daemon (rolloutd, pid %d) does not answer at %s", i.PID, i.GRPC),
	}
}

// refused explains err if it is a missing permission for a state folder: it names the owner of the
// folder and what to do. Other errors are returned as they are.
func refused(stateDir string, err error) error {
	if !errors.Is(err, os.ErrPermission) {
		return err
	}
	info, statErr := os.Stat(stateDir)
	if errors.Is(statErr, os.ErrNotExist) {
		return err
	}
	whose := "another user" // a folder above it cannot be read
	if statErr == nil {
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			if int(st.Uid) == os.Geteuid() {
				return exit.New(exit.NoPerm, "make the folder and its files readable and writable for yourself", "cannot use the state folder %s: %w", stateDir, err)
			}
			whose = fmt.Sprintf("uid %d", st.Uid)
			if owner, err := user.LookupId(fmt.Sprint(st.Uid)); err == nil {
				whose = "the user " + owner.Username
			}
		}
	}
	return exit.New(exit.NoPerm,
		"choose your own folder with --state-dir or ROLLOUT_STATE_DIR, or ask its owner for an API key (`rollout keys create`) and name the server with --server",
		"the state folder %s belongs to %s: %w", stateDir, whose, err)
}

// locked reports whether a rolloutd has locked the state folder; true if that is not known.
func locked(stateDir string) bool {
	f, err := os.Open(lockOf(stateDir))
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	defer f.Close()
	return syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB) != nil
}

// alive reports whether a process exists and is not a zombie.
func alive(pid int) bool {
	err := syscall.Kill(pid, 0)
	if err != nil && !errors.Is(err, syscall.EPERM) {
		return false
	}
	return !zombie(pid)
}
