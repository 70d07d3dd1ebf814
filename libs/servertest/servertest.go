// Package servertest starts real servers for tests: Consul, NATS, an S3 server (versitygw) and a
// GCS server (fake-gcs-server), each a process on free loopback ports with its own directory,
// removed after the test.
//
// `make servers` builds them into .tools/bin. Tests that use this package have the build tag
// "servers"; `make check-servers` runs them.
package servertest

import (
	"bytes"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/freeport"
)

// startTimeout is how long a server may take until it answers; the slowest, a Consul with a log on
// disk, needs three seconds.
const startTimeout = 60 * time.Second

// Process is a server that can be killed, frozen and started again with the same arguments.
type Process struct {
	t     testing.TB
	name  string
	args  []string
	env   []string
	ready func() error

	mu    sync.Mutex
	cmd   *exec.Cmd
	log   *output
	ended chan struct{}
}

// start runs a program of .tools/bin and returns when ready gives nil.
func start(t testing.TB, name string, args, env []string, ready func() error) *Process {
	t.Helper()
	p := &Process{t: t, name: name, args: args, env: env, ready: ready, log: &output{}}
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("the last of %s's log:\n%s", name, p.log.tail())
		}
	})
	p.Start()
	return p
}

// Start starts the process again after Kill, and returns when it answers.
func (p *Process) Start() {
	p.t.Helper()
	p.Launch()
	p.Await()
}

// Launch is Start that does not wait, for servers that get ready only together.
func (p *Process) Launch() {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	cmd := exec.Command(Binary(p.t, p.name), p.args...)
	cmd.Env = append([]string{"HOME=" + os.TempDir()}, p.env...)
	cmd.Stdout, cmd.Stderr = p.log, p.log
	cmd.SysProcAttr = dieWithParent()
	if err := cmd.Start(); err != nil {
		p.t.Fatalf("start %s: %v", p.name, err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = cmd.Wait() }()
	p.cmd, p.ended = cmd, ended
}

// Await returns when the process answers.
func (p *Process) Await() {
	p.t.Helper()
	p.mu.Lock()
	ended := p.ended
	p.mu.Unlock()
	deadline := time.NewTimer(startTimeout)
	defer deadline.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := p.ready()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ended:
			p.t.Fatalf("%s left before it served:\n%s", p.name, p.log.tail())
		case <-deadline.C:
			p.t.Fatalf("%s does not serve after %v: %v\n%s", p.name, startTimeout, err, p.log.tail())
		}
	}
}

// Kill kills the process with SIGKILL and waits for it. Only fsynced data remains. Idempotent.
func (p *Process) Kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// Freeze stops the process with SIGSTOP until Thaw.
func (p *Process) Freeze() { p.signal(syscall.SIGSTOP) }

// Thaw resumes a frozen process.
func (p *Process) Thaw() { p.signal(syscall.SIGCONT) }

func (p *Process) signal(s syscall.Signal) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("signal %s: %v", p.name, err)
	}
}

// Binary is the path of an installed server.
func Binary(t testing.TB, name string) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		path := filepath.Join(dir, ".tools", "bin", name)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	t.Fatalf("%s is not installed: run `make servers`", name)
	return ""
}

// freePorts are n different ports that are this process's.
func freePorts(t testing.TB, n int) []int {
	t.Helper()
	ports, err := freeport.Take(n)
	if err != nil {
		t.Fatal(err)
	}
	return ports
}

func local(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// listening reports whether the address accepts connections.
func listening(address string) error {
	conn, err := net.DialTimeout("tcp", address, time.Second)
	if err != nil {
		return err
	}
	return conn.Close()
}

// output keeps the last part of a process's output.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

const keptOutput = 4 << 10

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.b.Len() > 2*keptOutput {
		o.b.Next(o.b.Len() - keptOutput)
	}
	return o.b.Write(p)
}

func (o *output) tail() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	b := o.b.Bytes()
	return string(b[max(0, len(b)-keptOutput):])
}
