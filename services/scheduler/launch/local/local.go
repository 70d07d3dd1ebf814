// Package local starts workers as child processes.
//
// Each child leads its own process group, so signals to the terminal's group do not reach it, and
// its descendants are killed when it exits. Its standard input is a pipe that this process keeps
// open: end of file means that this process has exited.
package local

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// Launcher implements launch.Launcher.
type Launcher struct{}

type process struct {
	id    string
	cmd   *exec.Cmd
	stdin io.Closer // closed after the process has exited
	done  chan struct{}
	exit  launch.Exit
	stop  sync.Once
}

// Launch implements launch.Launcher.
func (Launcher) Launch(c launch.Command) (launch.Process, error) {
	if len(c.Args) == 0 {
		return nil, errors.New("no worker command is configured")
	}
	log, err := os.OpenFile(c.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the worker's log: %w", err)
	}
	defer log.Close() // the child has a copy of the descriptor
	var from int64
	if info, err := log.Stat(); err == nil {
		from = info.Size()
	}
	cmd := exec.Command(c.Args[0], c.Args[1:]...)
	cmd.Env, cmd.Dir = c.Env, c.Dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("make the worker's pipe: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Args[0], err)
	}
	// A pid alone is not unique: the system reuses it.
	p := &process{id: fmt.Sprintf("local-%d-%s", cmd.Process.Pid, rand.Text()[:8]), cmd: cmd, stdin: stdin, done: make(chan struct{})}
	go p.wait(c.Log, from)
	return p, nil
}

func (p *process) wait(log string, from int64) {
	_ = p.cmd.Wait() // ProcessState below has the result
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	p.exit = launch.Exit{Code: p.cmd.ProcessState.ExitCode(), LastLines: lastLines(log, from)}
	if status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		p.exit.Signal = status.Signal().String()
	}
	close(p.done)
}

func (p *process) ID() string            { return p.id }
func (p *process) PID() int              { return p.cmd.Process.Pid }
func (p *process) Done() <-chan struct{} { return p.done }

func (p *process) Exit() launch.Exit {
	<-p.done
	return p.exit
}

func (p *process) Stop(grace time.Duration) {
	p.stop.Do(func() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-p.done:
		case <-timer.C:
			_ = syscall.Kill(-p.PID(), syscall.SIGKILL)
		}
	})
	<-p.done
	_ = p.stdin.Close()
}

// lastLines reads the last lines that were written to a log after an offset.
func lastLines(path string, from int64) []string {
	const most = 32 << 10
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil {
		from = max(from, info.Size()-most)
	}
	if _, err := f.Seek(from, io.SeekStart); err != nil {
		return nil
	}
	b, _ := io.ReadAll(io.LimitReader(f, most))
	lines := strings.Split(strings.TrimRight(strings.ToValidUTF8(string(b), "?"), "\n"), "\n")
	if len(lines) == 1 && lines[0] == "" {
		return nil
	}
	return lines[max(0, len(lines)-launch.LastLines):]
}
