package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/program"
	"github.com/rollout-rl/rollout/libs/exit"
)

const (
	poll      = 20 * time.Millisecond
	lastLines = 10 // of the log, shown when the daemon does not come
)

// Starter starts daemons.
type Starter struct {
	StateDir string
	Binary   string        // rolloutd
	Args     []string      // further arguments
	Env      []string      // environment; nil: this process's own
	Patience time.Duration // how long the daemon may take to serve; 0: 60 s
}

// FindBinary looks for rolloutd next to this executable, then on PATH.
func FindBinary() (string, error) {
	found, err := program.Find("rolloutd")
	if err != nil {
		return "", exit.New(exit.Unavailable, "build it with `make build`, put it on PATH, or name a running server with --server",
			"there is no rolloutd beside rollout or on PATH")
	}
	return found, nil
}

// Ensure returns the living daemon, starting one where there is none. started says that it did.
func (s Starter) Ensure(ctx context.Context) (info *Info, started bool, err error) {
	if info, err = Find(s.StateDir); info != nil || err != nil {
		return info, false, err
	}
	if err := os.MkdirAll(filepath.Join(s.StateDir, "logs"), 0o700); err != nil {
		return nil, false, exit.New(exit.CannotMake, "choose another folder with --state-dir", "can't make the state folder: %w", err)
	}
	unlock, err := s.lock(ctx)
	if err != nil {
		return nil, false, err
	}
	defer unlock()
	if info, err = Find(s.StateDir); info != nil || err != nil { // somebody else was faster
		return info, false, err
	}
	info, err = s.start(ctx)
	return info, err == nil, err
}

// Coming waits for a daemon that somebody else is just starting; nil where nobody is.
func Coming(ctx context.Context, stateDir string) (*Info, error) {
	if _, err := os.Stat(lockFile(stateDir)); err != nil { // nobody ever started one, and who looks makes no folder
		return nil, nil
	}
	unlock, err := Starter{StateDir: stateDir}.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	return Find(stateDir)
}

func lockFile(stateDir string) string { return filepath.Join(stateDir, "rolloutd.start.lock") }

// lock waits for its turn among those who would start a daemon. The kernel lets go of it when a holder dies.
func (s Starter) lock(ctx context.Context) (func(), error) {
	f, err := os.OpenFile(lockFile(s.StateDir), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, exit.New(exit.CannotMake, "choose another folder with --state-dir", "can't make the lock file: %w", err)
	}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		if err := wait(ctx, poll); err != nil {
			f.Close()
			return nil, err
		}
	}
}

// start spawns the daemon in a session of its own and waits until it serves.
func (s Starter) start(ctx context.Context) (*Info, error) {
	log, err := os.OpenFile(LogFile(s.StateDir), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, exit.New(exit.CannotMake, "choose another folder with --state-dir", "can't write the daemon's log: %w", err)
	}
	defer log.Close()
	at, _ := log.Seek(0, io.SeekEnd)
	if at > logMost && putAway(log, log.Name()) == nil { // else it goes on growing; the daemon tells why it can't be put away
		at = 0
	}
	cmd := exec.Command(s.Binary, append([]string{"--state-dir", s.StateDir}, s.Args...)...) //nolint:noctx // it outlives us
	cmd.Stdout, cmd.Stderr, cmd.Env, cmd.Dir = log, log, s.Env, s.StateDir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, exit.New(exit.Unavailable, "check the binary", "can't start %s: %w", s.Binary, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	patience := s.Patience
	if patience == 0 {
		patience = time.Minute
	}
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	ticker := time.NewTicker(poll)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			if info, err := Find(s.StateDir); err == nil && info != nil && info.PID == cmd.Process.Pid {
				return info, nil
			}
		case err := <-ended:
			if err == nil {
				err = errors.New("it left with code 0")
			}
			return nil, s.failed(at, "rolloutd did not start: %w", err)
		case <-deadline.C:
			_ = cmd.Process.Signal(syscall.SIGTERM)
			return nil, s.failed(at, "rolloutd does not serve after %v; it was stopped", patience)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// failed adds the end of what the daemon wrote to its log.
func (s Starter) failed(at int64, format string, args ...any) error {
	path := LogFile(s.StateDir)
	data, _ := os.ReadFile(path)
	if int(at) <= len(data) { // else the daemon put away what was before
		data = data[at:]
	}
	data = bytes.TrimSpace(data)
	lines := strings.Split(string(data), "\n")
	lines = lines[max(0, len(lines)-lastLines):]
	err := fmt.Errorf(format, args...)
	if len(data) > 0 {
		err = fmt.Errorf("%w\n  | %s", err, strings.Join(lines, "\n  | "))
	}
	return exit.New(exit.Unavailable, "the whole log is "+path, "%w", err)
}

func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
