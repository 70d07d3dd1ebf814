package main

import (
	"bytes"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/exit"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

var testTime = time.UnixMilli(1_700_000_000_000)

func TestDrainRemovesTheRuntimeFileAndLeavesInPeace(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	conn := dial(t, d.runtime())
	tail, err := storagev1.NewEventServiceClient(conn).TailEvents(t.Context(), &storagev1.TailEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	d.signal(syscall.SIGHUP) // ignored
	d.signal(syscall.SIGTERM)
	if code := d.wait(); code != 0 {
		t.Fatalf("exit code %d:\n%s", code, d.log)
	}
	if _, err := config.ReadRuntime(config.RuntimeFile(d.state)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("runtime file: %v", err)
	}
	if _, err := tail.Recv(); err == nil {
		t.Error("a tail outlived the process")
	}
}

func TestRestartKeepsPortsTokenAndData(t *testing.T) {
	t.Parallel()
	state := t.TempDir()
	d := start(t, state)
	before := d.runtime()
	token, err := os.ReadFile(before.TokenFile)
	if err != nil {
		t.Fatal(err)
	}
	d.kill() // killed, so the runtime file remains
	again := start(t, state).runtime()
	if after, err := os.ReadFile(again.TokenFile); err != nil || !bytes.Equal(after, token) {
		t.Errorf("the token changed (%v)", err)
	}
	before.PID, again.PID = 0, 0
	if before.GRPC != again.GRPC || before.NATS != again.NATS || before.Consul != again.Consul || before.Gateway != again.Gateway {
		t.Errorf("before %+v\nafter  %+v", before, again)
	}
}

func TestOneProcessAStateFolder(t *testing.T) {
	t.Parallel()
	d := start(t, t.TempDir())
	second := spawn(t, d.state)
	if code := second.wait(); code != exit.Unavailable || !strings.Contains(second.log.String(), "fix=") || !strings.Contains(second.log.String(), "pid "+strconv.Itoa(d.cmd.Process.Pid)) {
		t.Errorf("exit code %d:\n%s", code, second.log)
	}
	if d.runtime().PID != d.cmd.Process.Pid {
		t.Error("the first one was disturbed")
	}
}

func TestSmallAtRest(t *testing.T) {
	if raced {
		t.Skip("the race detector keeps its own record of all memory: the bound is of a build without it")
	}
	d := start(t, t.TempDir())
	status, err := os.ReadFile("/proc/" + strconv.Itoa(d.cmd.Process.Pid) + "/status")
	if err != nil {
		t.Logf("no resident size on this system: %v", err)
		return
	}
	kib := 0
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			if kib, err = strconv.Atoi(f[1]); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Logf("%d MiB resident", kib>>10)
	if kib == 0 || kib > 150<<10 {
		t.Errorf("%d KiB resident; the bound is 150 MiB", kib)
	}
}

func TestBadCommandLines(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"unknown target":          {[]string{"--target", "bufer"}, exit.Usage, `"bufer" is not a target; targets are all, nats`},
		"all and more":            {[]string{"--target", "all,buffer"}, exit.Usage, "cannot be combined"},
		"no servers":              {[]string{"--target", "buffer"}, exit.Usage, "--join"},
		"two NATS servers":        {[]string{"--target", "nats,registry", "--nats-url", "nats://h:1"}, exit.Usage, "use one of the two"},
		"unknown flag":            {[]string{"--bufer"}, exit.Usage, "bufer"},
		"bad value":               {[]string{"--log-level", "loud"}, exit.Usage, "loud"},
		"token that all may read": {[]string{"--token-file", publicFile(t)}, exit.Unavailable, "0600"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			code := run(t.Context(), t.Context(), append([]string{"--state-dir", t.TempDir()}, c.args...), []string{"HOME=/"}, &out)
			if code != c.code || !strings.Contains(out.String(), c.says) {
				t.Errorf("exit code %d: %s", code, &out)
			}
		})
	}
}

// repeated finds a part of an error that is repeated.
func repeated(text string) string {
	said := map[string]bool{}
	for part := range strings.SplitSeq(text, ": ") {
		if len(part) > 20 && said[part] {
			return part
		}
		said[part] = true
	}
	return ""
}

// Missing resources at the start are reported with a code and a fix.
func TestStartsThatCanNotBe(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // a test
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() })
	port := taken.Addr().String()
	damaged := t.TempDir()
	if err := os.MkdirAll(filepath.Join(damaged, "db"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(damaged, "db", "buffer.sqlite"), []byte(strings.Repeat("no database ", 99)), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"a variable that is not set": {[]string{"--nats-token", "env:NOT_SET"}, exit.NoInput, "NOT_SET"},
		"a secret's file is missing": {[]string{"--nats-token", "file:/none"}, exit.NoInput, "/none"},
		"a certificate is missing":   {[]string{"--tls-cert-file", "/none.pem", "--tls-key-file", "/none"}, exit.NoInput, "/none.pem"},
		"a token's file is missing":  {[]string{"--token-file", "/none"}, exit.NoInput, "/none"},
		"a port in use":              {[]string{"--listen", port}, exit.Unavailable, port},
		"a gateway's port in use":    {[]string{"--gateway-listen", port}, exit.Unavailable, "gateway.listen"},
		"a damaged database":         {[]string{"--state-dir", damaged}, exit.Data, "buffer.sqlite"},
		"PostgreSQL is down":         {[]string{"--database-url", "postgres://u@127.0.0.1:1/db"}, exit.Unavailable, "database.url"},
		"Consul is down":             {[]string{"--consul-address", "127.0.0.1:1"}, exit.Unavailable, "consul.address"},
		"a file for a folder":        {[]string{"--state-dir", publicFile(t)}, exit.CannotMake, "state folder"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			code := run(t.Context(), t.Context(), append([]string{"--state-dir", t.TempDir()}, c.args...), []string{"HOME=/", "KEY=k"}, &out)
			if twice := repeated(out.String()); twice != "" {
				t.Errorf("%q is printed twice: %s", twice, &out)
			}
			if code != c.code || !strings.Contains(out.String(), c.says) || !strings.Contains(out.String(), "fix=") {
				t.Errorf("exit code %d: %s", code, &out)
			}
		})
	}
}

func publicFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte("x\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestHelpNamesTheTargets(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if code := run(t.Context(), t.Context(), []string{"--help"}, []string{"HOME=/"}, &out); code != 0 || !strings.Contains(out.String(), "learner-controller") {
		t.Errorf("exit code %d: %s", code, &out)
	}
}

func TestAllLeavesOutServersThatAreElsewhere(t *testing.T) {
	t.Parallel()
	names := func(c config.Config) string {
		list, err := resolveTargets(c)
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, x := range list {
			out = append(out, x.name)
		}
		return strings.Join(out, " ")
	}
	base := config.Default("/s")
	if got := names(base); !strings.HasPrefix(got, "nats registry storage ") {
		t.Errorf("alone: %s", got)
	}
	external := base
	external.NATS.URL, external.Consul.Address = "nats://h:4222", "h:8500"
	joined := base
	joined.Join = "/other"
	for _, c := range []config.Config{external, joined} {
		if got := names(c); !strings.HasPrefix(got, "storage ") {
			t.Errorf("servers elsewhere: %s", got)
		}
	}
}

// A signal ends a process that waits for its NATS server.
func TestASignalEndsTheStart(t *testing.T) {
	t.Parallel()
	d := spawn(t, t.TempDir(), "--target", "registry,planner", "--nats-url", "nats://127.0.0.1:"+freePort(t))
	d.until("take the lock", func() bool { return strings.Contains(lockOwner(d.state), strconv.Itoa(d.cmd.Process.Pid)) })
	d.signal(syscall.SIGTERM)
	if code := d.wait(); code == 0 || code == -1 {
		t.Errorf("exit code %d:\n%s", code, d.log)
	}
}

func lockOwner(state string) string {
	data, _ := os.ReadFile(filepath.Join(state, "rolloutd.lock"))
	return string(data)
}
