package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/freeport"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/servertest"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
)

// asDaemon is the variable that makes the test binary run as rolloutd.
const asDaemon = "ROLLOUT_TEST_AS_DAEMON"

func TestMain(m *testing.M) {
	if os.Getenv(asDaemon) != "" {
		main()
	}
	os.Exit(m.Run())
}

// daemon is one rolloutd process.
type daemon struct {
	t     *testing.T
	state string
	cmd   *exec.Cmd
	log   *syncBuffer
	ended chan struct{}
}

// syncBuffer is read while the process writes.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}
func (s *syncBuffer) String() string { s.mu.Lock(); defer s.mu.Unlock(); return s.b.String() }

// spawn starts a process on a state folder and does not wait for it.
func spawn(t *testing.T, state string, args ...string) *daemon {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{t: t, state: state, log: &syncBuffer{}, ended: make(chan struct{})}
	d.cmd = exec.Command(self, append([]string{"--state-dir", state}, args...)...)
	d.cmd.Env = []string{asDaemon + "=1", "HOME=" + t.TempDir(), "PATH=" + os.Getenv("PATH")}
	d.cmd.Stdout, d.cmd.Stderr = d.log, d.log
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { defer close(d.ended); _ = d.cmd.Wait() }()
	t.Cleanup(d.kill)
	return d
}

// start is spawn that waits until the process serves.
func start(t *testing.T, state string, args ...string) *daemon {
	t.Helper()
	d := spawn(t, state, args...)
	d.runtime()
	return d
}

// runtime waits for the runtime file of this process.
func (d *daemon) runtime() config.Runtime {
	d.t.Helper()
	var r config.Runtime
	d.until("serve", func() bool {
		var err error
		r, err = config.ReadRuntime(config.RuntimeFile(d.state))
		return err == nil && r.PID == d.cmd.Process.Pid
	})
	return r
}

// until waits until the state folder of the process meets a condition.
func (d *daemon) until(what string, reached func() bool) {
	d.t.Helper()
	deadline := time.NewTimer(2 * time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !reached() {
		select {
		case <-tick.C:
		case <-d.ended:
			d.t.Fatalf("rolloutd exited before it could %s:\n%s", what, d.log)
		case <-deadline.C:
			d.t.Fatalf("rolloutd does not %s:\n%s", what, d.log)
		}
	}
}

func (d *daemon) signal(s os.Signal) {
	d.t.Helper()
	if err := d.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		d.t.Fatal(err)
	}
}

// wait returns the exit code.
func (d *daemon) wait() int {
	d.t.Helper()
	select {
	case <-d.ended:
		return d.cmd.ProcessState.ExitCode()
	case <-time.After(2 * time.Minute):
		d.t.Fatalf("rolloutd does not end:\n%s", d.log)
		return -1
	}
}

func (d *daemon) kill() {
	_ = d.cmd.Process.Signal(syscall.SIGKILL)
	<-d.ended
}

// dial connects to a process with its token.
func dial(t *testing.T, r config.Runtime) *grpc.ClientConn {
	t.Helper()
	token, err := rpc.ReadToken(r.TokenFile)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := rpc.NewDialer(rpc.DialerOptions{Token: token, TLS: certificates(t, r)}).Dial(r.GRPC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// certificates are the certificates of a process and its clients; nil: plain text.
func certificates(t *testing.T, r config.Runtime) *cert.Source {
	t.Helper()
	if r.CertFile == "" {
		return nil
	}
	s, err := cert.Open(cert.Files{CA: r.CAFile, Cert: r.CertFile, Key: r.KeyFile}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// mesh of processes: service name to the process that hosts it.
type shape map[string]*daemon

func allShape(t *testing.T) shape {
	t.Helper()
	d := start(t, t.TempDir())
	out := shape{}
	for _, name := range serviceNames(targets) {
		out[name] = d
	}
	return out
}

// postgresShape is allShape with its state in PostgreSQL.
func postgresShape(t *testing.T) shape {
	t.Helper()
	place := sqldbtest.Place(t)
	d := start(t, t.TempDir(), "--database-url", place.URL, "--database-schema-prefix", place.Prefix)
	out := shape{}
	for _, name := range serviceNames(targets) {
		out[name] = d
	}
	return out
}

// sevenShape starts all processes at once: each one waits for the process that it joins.
func sevenShape(t *testing.T) shape { return seven(t) }

// mutualShape is sevenShape with mutual TLS between all processes.
func mutualShape(t *testing.T) shape {
	t.Helper()
	ca := servertest.NewCA(t)
	certFile, keyFile := ca.Issue(t, "mesh")
	return seven(t, "--tls-ca-file", ca.File, "--tls-cert-file", certFile, "--tls-key-file", keyFile)
}

func seven(t *testing.T, args ...string) shape {
	t.Helper()
	root := t.TempDir()
	out := shape{}
	for _, name := range serviceNames(targets) {
		out[name] = spawn(t, filepath.Join(root, name), append(args, "--target", name, "--join", root)...)
	}
	out["servers"] = start(t, root, append(args, "--target", natsTarget+","+registryTarget)...)
	for _, d := range out {
		d.runtime()
	}
	return out
}

func (s shape) conn(t *testing.T, service string) *grpc.ClientConn {
	t.Helper()
	return dial(t, s[service].runtime())
}

func deadline(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func freePort(t *testing.T) string {
	t.Helper()
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	return strconv.Itoa(ports[0])
}
