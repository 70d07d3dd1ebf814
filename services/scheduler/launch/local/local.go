// Package local starts workers as child processes.
//
// Each child leads its own process group, so signals to the terminal's group do not reach it, and
// its descendants are killed when it exits. Its standard input is a pipe that this process keeps
// open: end of file means that this process has exited. Its output is a pipe too, from which this
// process writes the worker's log, bounded in size and rate.
package local

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// Launcher implements launch.Launcher.
type Launcher struct{ Log LogLimits }

type process struct {
	id    string
	cmd   *exec.Cmd
	stdin io.Closer // closed after the process has exited
	log   *workerLog
	done  chan struct{}
	exit  launch.Exit
	stop  sync.Once
}

// outputGrace is how long an exit waits for the end of the output, in case a descendant outside of
// the killed group keeps the pipe open.
const outputGrace = time.Second

// Launch implements launch.Launcher.
func (l Launcher) Launch(c launch.Command) (launch.Process, error) {
	if len(c.Args) == 0 {
		return nil, errors.New("no worker command is configured")
	}
	output, input, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make the pipe of the worker's output: %w", err)
	}
	defer input.Close() // the child has a copy of the descriptor
	log, err := openLog(c.Log, l.Log)
	if err != nil {
		return nil, errors.Join(err, output.Close())
	}
	cmd := exec.Command(c.Args[0], c.Args[1:]...)
	cmd.Env, cmd.Dir = c.Env, c.Dir
	cmd.Stdout, cmd.Stderr = input, input
	// The child keeps the pipe whole: if this process is killed, a print of a reward must not fail
	// before the child sees the end of its standard input.
	cmd.ExtraFiles = []*os.File{output}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		log.finish()
		return nil, errors.Join(fmt.Errorf("start %s: %w", c.Args[0], err), output.Close())
	}
	// A pid alone is not unique: the system reuses it.
	p := &process{id: fmt.Sprintf("local-%d-%s", cmd.Process.Pid, rand.Text()[:8]), cmd: cmd, stdin: stdin, log: log, done: make(chan struct{})}
	go p.wait(output)
	return p, nil
}

// wait reads the output of the process until it has exited.
func (p *process) wait(output *os.File) {
	read := make(chan struct{})
	go func() {
		defer close(read)
		p.log.copyFrom(output)
		_ = output.Close()
	}()
	_ = p.cmd.Wait() // ProcessState below has the result
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	grace := time.NewTimer(outputGrace)
	defer grace.Stop()
	select {
	case <-read:
	case <-grace.C:
	}
	p.exit = launch.Exit{Code: p.cmd.ProcessState.ExitCode(), LastLines: p.log.lastLines()}
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
