//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/sandbox"
)

// within fails the test if a step takes longer than a healthy box does on a busy machine.
func within(t *testing.T, what string, step func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		step()
	}()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s did not return", what)
	}
}

func TestPipesInPlaceOfFilesAreRefused(t *testing.T) {
	t.Parallel()
	eachUser(t, func(t *testing.T, c *client) {
		b := c.open(spec())
		if r := b.shell("mkfifo pipe; touch victim; ln -s victim link"); r.ExitCode != 0 {
			t.Fatal(string(r.Stderr))
		}
		for _, path := range []string{"pipe", "link"} {
			within(t, "a command with the file "+path, func() {
				command := sandbox.Command{Argv: []string{"true"}, Files: []sandbox.File{{Path: path, Content: sandbox.Data("x")}}, WallTimeS: 1}
				err := c.call("exec", map[string]any{"box": b.ID, "command": command}, nil)
				if reasonOf(err) != sandbox.ReasonSpec {
					t.Errorf("%s was written: %v", path, err)
				}
			})
		}
	})
}

func TestFilesOfTheBoxDoNotOverwriteBinds(t *testing.T) {
	t.Parallel()
	eachUser(t, func(t *testing.T, c *client) {
		folder := t.TempDir()
		for path := folder; path != "/tmp" && path != "/"; path = filepath.Dir(path) {
			_ = os.Chmod(path, 0o777)
		}
		hosts := filepath.Join(folder, "hosts")
		if err := os.WriteFile(hosts, []byte("of the host\n"), 0o666); err != nil {
			t.Fatal(err)
		}
		_ = os.Chmod(hosts, 0o666)
		s := spec()
		s.Binds = append(s.Binds, sandbox.Bind{Source: hosts, Target: "/etc/hosts", Writable: true})
		r := c.run(s, sandbox.Command{Argv: []string{"cat", "/etc/hosts", "/etc/passwd"}})
		if raw, _ := os.ReadFile(hosts); string(raw) != "of the host\n" {
			t.Errorf("the host's file is %q", raw)
		}
		if !strings.HasPrefix(string(r.Stdout), "of the host\nroot:") {
			t.Errorf("the box shows %s", r.Stdout)
		}
	})
}

func TestCrashesStartNoProgramOfTheHost(t *testing.T) {
	t.Parallel()
	eachUser(t, func(t *testing.T, c *client) {
		// With the limit 1, the kernel does not start the program of a piped core_pattern.
		r := c.shell("grep 'core file' /proc/self/limits")
		if got := strings.Fields(string(r.Stdout)); len(got) < 6 || got[4] != "1" || got[5] != "1" {
			t.Errorf("core file size: %q, want 1", r.Stdout)
		}
	})
}

func TestMemoryOfAProcessWithoutItsFirstThreadCounts(t *testing.T) {
	t.Parallel()
	python(t)
	code := `
import ctypes, threading, time
def hold():
    time.sleep(0.5)  # until the first thread has ended
    held = bytearray(256 << 20)
    time.sleep(5)
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
`
	eachUser(t, func(t *testing.T, c *client) {
		r := c.run(spec(), sandbox.Command{Argv: []string{"/usr/bin/python3", "-I", "-S", "-c", code}})
		c.contained(r, sandbox.LimitMemory, sandbox.Memory)
	})
}

func TestMemoryWithoutAProcessIsDeniedWhereItIsNotCounted(t *testing.T) {
	t.Parallel()
	python(t)
	eachUser(t, func(t *testing.T, c *client) {
		if c.report.By(sandbox.Memory) != "rlimit and watch" {
			t.Skip("a control group counts it")
		}
		r := c.run(spec(), sandbox.Command{Argv: []string{"/usr/bin/python3", "-I", "-S", "-c", "import os; os.memfd_create('m')"}})
		c.contained(r, sandbox.Denied, "syscalls")
		if r := c.shell("ipcmk -M 100 && exit 9; ipcmk -Q && exit 9; exit 3"); r.ExitCode != 3 {
			t.Errorf("shared memory or a queue was created: %s", r.Stdout)
		}
	})
}

func TestOutputThatAnotherProcessHoldsDoesNotDelayTheEnd(t *testing.T) {
	t.Parallel()
	python(t)
	const hold = `
import socket, time
s = socket.socket(socket.AF_UNIX); s.bind('/tmp/s'); s.listen(1)
c, _ = s.accept(); held = socket.recv_fds(c, 1, 2); c.send(b'x'); time.sleep(60)
`
	const give = `
import socket, time
s = socket.socket(socket.AF_UNIX)
while s.connect_ex('/tmp/s'): time.sleep(0.01)
socket.send_fds(s, [b'x'], [1, 2]); s.recv(1); print('given')
`
	eachUser(t, func(t *testing.T, c *client) {
		b := c.open(spec())
		command := func(code string) sandbox.Command {
			return sandbox.Command{Argv: []string{"/usr/bin/python3", "-I", "-S", "-c", code}, WallTimeS: 50}
		}
		c.must("start", map[string]any{"box": b.ID, "command": command(hold)}, nil)
		within(t, "the command", func() {
			if r := b.exec(command(give)); string(r.Stdout) != "given\n" {
				t.Errorf("%+v: %s", r, r.Stderr)
			}
		})
	})
}
