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
	lastLines = 10 // of the log, shown when the daemon does not start
)

// Starter starts daemons.
type Starter struct {
	StateDir string
	Binary   string        // rolloutd
	Args     []string      // further arguments
	Env      []string      // environment; nil: this process's own
	Timeout  time.Duration // until the daemon serves; 0: 60 s
}

// rememberedFile has the arguments that later starts in the state folder repeat, one per line.
func rememberedFile(stateDir string) string { return filepath.Join(stateDir, "rolloutd.args") }

// Remember stores the arguments with which Remembered answers; none: it forgets them. While a
// daemon runs it changes nothing.
func Remember(stateDir string, args []string) error {
	if info, err := Find(stateDir); info != nil || err != nil {
		return err
	}
	if len(args) == 0 {
		if err := os.Remove(rememberedFile(stateDir)); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
			return cannotMake(stateDir, "forget the configuration file", err)
		}
		return nil
	}
	if err := os.MkdirAll(stateDir, 0o700); err != nil {
		return cannotMake(stateDir, "create the state folder", err)
	}
	if err := os.WriteFile(rememberedFile(stateDir), []byte(strings.Join(args, "\n")+"\n"), 0o600); err != nil {
		return cannotMake(stateDir, "remember the configuration file", err)
	}
	return nil
}

// Remembered returns the arguments of the last start that had some.
func Remembered(stateDir string) ([]string, error) {
	text, err := os.ReadFile(rememberedFile(stateDir))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) { // an invalid folder is reported when a daemon is started
		return nil, nil
	}
	if err != nil {
		return nil, refused(stateDir, fmt.Errorf("read how the daemon was started: %w", err))
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n"), nil
}

// FindBinary looks for rolloutd next to this executable, then on PATH.
func FindBinary() (string, error) {
	found, err := program.Find("rolloutd")
	if err != nil {
		return "", exit.New(exit.Unavailable, "build it with `make build`, put it on PATH, or name a running server with --server",
			"rolloutd was not found in the folder of rollout or on PATH")
	}
	return found, nil
}

// Ensure returns the running daemon, or starts one.
func (s Starter) Ensure(ctx context.Context) (info *Info, started bool, err error) {
	if info, err = Find(s.StateDir); info != nil || err != nil {
		return info, false, err
	}
	if err := os.MkdirAll(filepath.Join(s.StateDir, "logs"), 0o700); err != nil {
		return nil, false, cannotMake(s.StateDir, "create the state folder", err)
	}
	unlock, err := s.lock(ctx)
	if err != nil {
		return nil, false, err
	}
	defer unlock()
	if info, err = Find(s.StateDir); info != nil || err != nil { // another process has started it
		return info, false, err
	}
	info, err = s.start(ctx)
	return info, err == nil, err
}

// Starting waits for a daemon that another process is starting. It returns nil if no process is.
func Starting(ctx context.Context, stateDir string) (*Info, error) {
	if _, err := os.Stat(lockFile(stateDir)); err != nil { // none was ever started here; do not create the folder
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

// lock waits for the lock that serializes starts. The kernel releases it when its process dies.
func (s Starter) lock(ctx context.Context) (func(), error) {
	f, err := os.OpenFile(lockFile(s.StateDir), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, cannotMake(s.StateDir, "create the lock file", err)
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

// start starts the daemon in a new session and waits until it serves.
func (s Starter) start(ctx context.Context) (*Info, error) {
	log, err := os.OpenFile(LogFile(s.StateDir), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, cannotMake(s.StateDir, "write the log of the daemon", err)
	}
	defer log.Close()
	at, _ := log.Seek(0, io.SeekEnd)
	if at > logMost && rotate(log, log.Name()) == nil { // the daemon logs why rotation fails
		at = 0
	}
	cmd := exec.Command(s.Binary, append([]string{"--state-dir", s.StateDir}, s.Args...)...) //nolint:noctx // the daemon outlives this process
	cmd.Stdout, cmd.Stderr, cmd.Env, cmd.Dir = log, log, s.Env, s.StateDir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, exit.New(exit.Unavailable, "check the binary", "cannot start %s: %w", s.Binary, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	timeout := s.Timeout
	if timeout == 0 {
		timeout = time.Minute
	}
	deadline := time.NewTimer(timeout)
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
				err = errors.New("it exited with code 0")
			}
			return nil, s.failed(at, "rolloutd did not start: %w", err)
		case <-deadline.C:
			_ = cmd.Process.Signal(syscall.SIGTERM)
			return nil, s.failed(at, "rolloutd did not serve within %v and was stopped", timeout)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// cannotMake returns the error of a state folder that cannot be written.
func cannotMake(stateDir, what string, err error) error {
	var explained *exit.Error
	if errors.As(refused(stateDir, err), &explained) {
		return explained
	}
	return exit.New(exit.CannotMake, "choose another folder with --state-dir", "cannot %s: %w", what, err)
}

// failed returns an error with the end of the log of the daemon.
func (s Starter) failed(at int64, format string, args ...any) error {
	path := LogFile(s.StateDir)
	data, _ := os.ReadFile(path)
	if int(at) <= len(data) { // else the log was rotated
		data = data[at:]
	}
	data = bytes.TrimSpace(data)
	lines := strings.Split(string(data), "\n")
	lines = lines[max(0, len(lines)-lastLines):]
	err := fmt.Errorf(format, args...)
	if len(data) > 0 {
		err = fmt.Errorf("%w\n  | %s", err, strings.Join(lines, "\n  | "))
	}
	return exit.New(exit.Unavailable, "see the log "+path, "%w", err)
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
