//go:build linux

package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/sandbox"
)

func TestFilesOfTheHostAreNotInTheBox(t *testing.T) {
	t.Parallel()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("mesh-token"), 0o600); err != nil {
		t.Fatal(err)
	}
	eachUser(t, func(t *testing.T, c *client) {
		for _, path := range []string{"/etc/shadow", token, "/root", "/var", "/sys", "/boot", "/dev/kmsg", "/dev/mem", "/proc/1/root/etc/shadow", "/proc/self/cwd/../../../etc/shadow"} {
			r := c.shell("cat " + path + " || ls " + path)
			c.contained(r, sandbox.Exited, "files")
			if r.ExitCode == 0 || strings.Contains(string(r.Stdout), "mesh-token") {
				t.Errorf("%s was read: %s", path, r.Stdout)
			}
		}
	})
}

func TestEnvironmentsOfOtherProcessesAreHidden(t *testing.T) {
	t.Parallel()
	other := exec.Command("sleep", "600")
	other.Env = []string{"SECRET=secret-of-another"}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Process.Kill(); _ = other.Wait() })
	t.Run("users", func(t *testing.T) {
		eachUser(t, func(t *testing.T, c *client) {
			r := c.shell("env; cat /proc/*/environ /proc/*/cmdline /proc/*/task/*/environ; ls /proc")
			c.contained(r, sandbox.Exited, "processes")
			if strings.Contains(string(r.Stdout), "secret-of-") || strings.Contains(string(r.Stdout), strconv.Itoa(other.Process.Pid)+"\n") {
				t.Errorf("another process is visible: %s", r.Stdout)
			}
		})
	})
}

func TestNetworksAreOutOfReach(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	abstract, err := net.Listen("unix", "@"+t.Name())
	if err != nil {
		t.Fatal(err)
	}
	datagrams, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	reached := make(chan string, 100)
	for _, l := range []net.Listener{listener, abstract} {
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				conn.Close()
				reached <- l.Addr().String()
			}
		}()
	}
	go func() {
		for {
			n, from, err := datagrams.ReadFrom(make([]byte, 10))
			if err != nil {
				return
			}
			reached <- fmt.Sprint(n, from)
		}
	}()
	t.Cleanup(func() { listener.Close(); abstract.Close(); datagrams.Close() })
	t.Run("users", func(t *testing.T) {
		eachUser(t, func(t *testing.T, c *client) {
			for _, attempt := range [][]string{
				{"loopback", listener.Addr().String()}, {"metadata"}, {"abstract", "@" + "TestNetworksAreOutOfReach"}, {"datagram", datagrams.LocalAddr().String()},
			} {
				r := c.escape(attempt...)
				c.contained(r, sandbox.Exited, "network")
				if r.ExitCode != 3 {
					t.Errorf("%s: %s", attempt, r.Stdout)
				}
			}
		})
	})
	select {
	case address := <-reached:
		t.Errorf("%s of the host was reached", address)
	default:
	}
}

func TestSystemCallsOfEscapesAreDenied(t *testing.T) {
	t.Parallel()
	eachUser(t, func(t *testing.T, c *client) {
		b := c.open(spec())
		names := strings.Fields(string(b.exec(sandbox.Command{Argv: []string{"/opt/escape", "list"}}).Stdout))
		if len(names) < 20 {
			t.Fatalf("the escape program tries only %q", names)
		}
		for _, name := range names {
			r := b.exec(sandbox.Command{Argv: []string{"/opt/escape", name}})
			if r.Reason != sandbox.Denied || r.ExitCode != 3 || !slices.ContainsFunc(r.Denied, func(d sandbox.Denial) bool { return d.Syscall == name }) {
				t.Errorf("%s: %s, denied %v: %s %s", name, r.Reason, r.Denied, r.Stdout, r.Stderr)
			}
		}
		for name, want := range map[string]string{
			"clone3": "function not implemented", "unknown": "function not implemented", "setuid": "", "capset": "operation not permitted",
			"rlimit": "operation not permitted", "mknod": "",
		} {
			r := b.exec(sandbox.Command{Argv: []string{"/opt/escape", name}})
			if r.Reason != sandbox.Exited || r.ExitCode != 3 || !strings.Contains(string(r.Stdout), want) {
				t.Errorf("%s: %s %d, want %q: %s %s", name, r.Reason, r.ExitCode, want, r.Stdout, r.Stderr)
			}
		}
		t.Logf("denied by %s: %s", c.report.By("syscalls"), strings.Join(names, " "))
	})
}

// i386 makes a system call of the other table, which a filter that compares only numbers misses.
const i386 = `
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))  # mov eax, getpid; int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
`

func TestSystemCallsOfOtherTablesAreNotImplemented(t *testing.T) {
	t.Parallel()
	if runtime.GOARCH != "amd64" {
		t.Skip("only amd64 has a second table")
	}
	python(t)
	eachUser(t, func(t *testing.T, c *client) {
		r := c.run(spec(), sandbox.Command{Argv: []string{"/usr/bin/python3", "-I", "-S", "-c", i386}})
		c.contained(r, sandbox.Exited, "syscalls")
		if got := strings.TrimSpace(string(r.Stdout)); got != "-38" {
			t.Errorf("getpid of i386 returned %s, want -38 (ENOSYS): %s", got, r.Stderr)
		}
	})
}

func python(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("/usr/bin/python3"); err != nil {
		t.Skip("this host has no /usr/bin/python3")
	}
}

func TestBombsReachTheirLimit(t *testing.T) {
	t.Parallel()
	script := func(text string) sandbox.Command {
		return sandbox.Command{Argv: []string{"/bin/sh", "-c", text}}
	}
	for name, bomb := range map[string]struct {
		reason, by string
		command    sandbox.Command
	}{
		"forks":       {sandbox.LimitPids, sandbox.Pids, sandbox.Command{Argv: []string{"/opt/escape", "forks"}}},
		"memory":      {sandbox.LimitMemory, sandbox.Memory, sandbox.Command{Argv: []string{"/opt/escape", "memory"}}},
		"output":      {sandbox.LimitOutput, "output_bytes", script("yes")},
		"errors":      {sandbox.LimitOutput, "output_bytes", script("yes >&2")},
		"one file":    {sandbox.LimitDisk, "disk_bytes", script("cat /dev/zero > file")},
		"many files":  {sandbox.LimitDisk, "disk_bytes", script("for i in 1 2 3 4 5 6; do head -c 1000000 /dev/zero > file$i || exit 1; done")},
		"other disks": {sandbox.LimitDisk, "disk_bytes", script("head -c 3000000 /dev/zero > /dev/shm/a; head -c 3000000 /dev/zero > /tmp/b")},
		"inodes":      {sandbox.LimitDisk, "disk_bytes", script("i=0; while : > n$i; do i=$((i+1)); done")},
		"time":        {sandbox.LimitWall, "wall_time_s", sandbox.Command{Argv: []string{"/bin/sh", "-c", "while :; do :; done"}, WallTimeS: 0.5}},
	} {
		t.Run(name, func(t *testing.T) {
			eachUser(t, func(t *testing.T, c *client) {
				if by := c.report.By(bomb.by); by == sandbox.None {
					t.Skipf("this host does not enforce %s, so its bomb is not tried", bomb.by)
				}
				c.contained(c.run(spec(), bomb.command), bomb.reason, bomb.by)
			})
		})
	}
}

func TestMemoryOfAllProcessesCountsTogether(t *testing.T) {
	t.Parallel()
	python(t)
	code := `
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(16 << 20)
        time.sleep(60)
        os._exit(0)
for _ in range(6):
    _, status = os.wait()
    if status:
        os._exit(9)
`
	eachUser(t, func(t *testing.T, c *client) {
		c.contained(c.run(spec(), sandbox.Command{Argv: []string{"/usr/bin/python3", "-I", "-S", "-c", code}}), sandbox.LimitMemory, sandbox.Memory)
	})
}

func TestWritesDoNotLeaveTheBox(t *testing.T) {
	t.Parallel()
	eachUser(t, func(t *testing.T, c *client) {
		shared := t.TempDir()
		victim := filepath.Join(shared, "victim")
		for path := shared; path != "/tmp" && path != "/"; path = filepath.Dir(path) {
			_ = os.Chmod(path, 0o777)
		}
		if err := os.WriteFile(victim, []byte("intact"), 0o666); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(victim, filepath.Join(shared, "link")); err != nil {
			t.Fatal(err)
		}
		s := spec()
		s.Binds = append(s.Binds, sandbox.Bind{Source: shared, Target: "/data"})
		b := c.open(s)
		for _, path := range []string{
			"/data/victim", "/data/link", "/data/new", "/data/../data/victim", "/usr/new", "/etc/passwd", "/new", "/home/sandbox/../../new", "/dev/null/../new",
			"/proc/self/root/new", "/proc/1/root/new", "/opt/escape", "/proc/sys/kernel/core_pattern", victim,
		} {
			if r := b.shell("echo broken > " + path); r.ExitCode == 0 {
				t.Errorf("%s was written", path)
			}
		}
		r := b.shell("ln -s /etc/passwd inside; ln -s /data/victim outside; mkfifo pipe")
		if r.ExitCode != 0 {
			t.Fatalf("links: %s", r.Stderr)
		}
		for _, path := range []string{"inside", "outside", "../../etc/passwd", "/data/new"} {
			err := c.call("exec", map[string]any{"box": b.ID, "command": sandbox.Command{
				Argv: []string{"true"}, Files: []sandbox.File{{Path: path, Content: sandbox.Data("broken")}},
			}}, nil)
			if reasonOf(err) != sandbox.ReasonSpec {
				t.Errorf("the file %s of a command was written: %v", path, err)
			}
		}
		if raw, err := os.ReadFile(victim); err != nil || string(raw) != "intact" {
			t.Errorf("the host's file is %q, %v", raw, err)
		}
		c.contained(b.shell("exit 1"), sandbox.Exited, "files")
	})
}

func TestTheParentSurvivesEverySignal(t *testing.T) {
	t.Parallel()
	eachUser(t, func(t *testing.T, c *client) {
		b := c.open(spec())
		r := b.exec(sandbox.Command{Argv: []string{"/opt/escape", "signals"}})
		c.contained(r, sandbox.Exited, "processes")
		if after := b.shell("echo alive"); string(after.Stdout) != "alive\n" {
			t.Errorf("the box is gone: %+v", after)
		}
		if r := b.shell(fmt.Sprintf("kill -9 %d %d", os.Getpid(), c.cmd.Process.Pid)); r.ExitCode == 0 {
			t.Errorf("a process of the host was found: %s", r.Stderr)
		}
	})
}

func TestDaemonsAreKilledWithTheirCommand(t *testing.T) {
	t.Parallel()
	eachUser(t, func(t *testing.T, c *client) {
		marker := fmt.Sprintf("stubborn-%d", c.cmd.Process.Pid)
		b := c.open(spec())
		r := b.exec(sandbox.Command{Argv: []string{"/opt/escape", "stubborn", marker}, WallTimeS: 0.5})
		c.contained(r, sandbox.LimitWall, "processes")
		if onHost(marker) {
			t.Error("a process survived the wall time of its command")
		}
		// A command that ends by itself takes its daemons along, but not other commands.
		var kept struct{ Process string }
		c.must("start", map[string]any{"box": b.ID, "command": sandbox.Command{Argv: []string{"/bin/sh", "-c", "sleep 86399 | cat"}}}, &kept)
		r = b.shell("/opt/escape stubborn " + marker + " & setsid sleep 86398 & sleep 0.2; ps ax")
		if r.Reason != sandbox.Exited || !strings.Contains(string(r.Stdout), marker) {
			t.Fatalf("the daemon did not start: %+v %s %s", r.Reason, r.Stdout, r.Stderr)
		}
		left := string(b.shell("ps ax").Stdout)
		if strings.Contains(left, marker) || strings.Contains(left, "86398") || !strings.Contains(left, "86399") {
			t.Errorf("after the command run: %s", left)
		}
		if onHost(marker) {
			t.Error("a daemon survived its command")
		}
	})
}

func TestShortCommandsEndInOrder(t *testing.T) {
	t.Parallel()
	eachUser(t, func(t *testing.T, c *client) {
		b := c.open(spec())
		for n := range 60 {
			if r := b.exec(sandbox.Command{Argv: []string{"true"}, WallTimeS: 10}); r.Reason != sandbox.Exited {
				t.Fatalf("command %d: %s", n, r.Reason)
			}
		}
	})
}

func TestForkBombsNextToARunningCommandAreKilled(t *testing.T) {
	t.Parallel()
	eachUser(t, func(t *testing.T, c *client) {
		b := c.open(spec())
		var kept struct{ Process string }
		c.must("start", map[string]any{"box": b.ID, "command": sandbox.Command{Argv: []string{"cat"}}}, &kept)
		r := b.exec(sandbox.Command{Argv: []string{"/bin/sh", "-c", "b() { b | b & }; b; sleep 20"}, WallTimeS: 10, OutputBytes: 1 << 20})
		if r.Reason != sandbox.LimitWall && r.Reason != sandbox.LimitPids || !slices.Contains(r.LimitsHit, sandbox.LimitPids) {
			t.Errorf("reason %s, limits %v", r.Reason, r.LimitsHit)
		}
		if lines := strings.Count(string(b.shell("ps ax").Stdout), "\n"); lines > 5 {
			t.Errorf("%d processes are left", lines)
		}
		c.must("write", map[string]any{"process": kept.Process, "data": "still here"}, nil)
		if e := <-c.events; string(e.Data) != "still here" {
			t.Errorf("the running command was hurt: %+v", e)
		}
	})
}

func TestNoStateReachesTheNextUser(t *testing.T) {
	t.Parallel()
	leave := "echo leak > file; echo leak > /tmp/file; echo leak > /dev/shm/file; setsid sleep 86397 & ipcmk -M 100 -Q -S 1 2>&1; true"
	find := "ls -A /home/sandbox /tmp /dev/shm; ipcs -m -q -s | grep 0x; ps ax | grep [8]6397; true"
	want := "/dev/shm:\n\n/home/sandbox:\n\n/tmp:\n"
	eachUser(t, func(t *testing.T, c *client) {
		c.must("warm", sandbox.Warm{Spec: spec(), Count: 1}, nil)
		for range 2 {
			if r := c.shell(leave); r.ExitCode != 0 {
				t.Fatalf("%s", r.Stderr)
			}
			if got := string(c.shell(find).Stdout); got != want {
				t.Errorf("the next box has:\n%s", got)
			}
		}
		b := c.open(spec())
		b.exec(sandbox.Command{Argv: []string{"/bin/sh", "-c", leave}, KeepBackground: true})
		if got := string(b.shell(find).Stdout); !strings.Contains(got, "file") {
			t.Errorf("the box kept no files:\n%s", got)
		}
		c.must("reset", map[string]any{"box": b.ID}, nil)
		if got := string(b.shell(find).Stdout); got != want {
			t.Errorf("after the reset the box has:\n%s", got)
		}
	})
}

func TestNothingRemainsWhenTheServerEnds(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"end of input", "kill"} {
		t.Run(how, func(t *testing.T) {
			eachUser(t, func(t *testing.T, c *client) {
				pid := strconv.Itoa(c.cmd.Process.Pid)
				marker := "remains-" + strings.ReplaceAll(how, " ", "-") + "-" + pid
				b := c.open(spec())
				c.must("start", map[string]any{"box": b.ID, "command": sandbox.Command{Argv: []string{"/opt/escape", "stubborn", marker}}}, nil)
				if e := <-c.events; string(e.Data) != "started\n" || !onHost(marker) {
					t.Fatalf("the command did not start: %+v", e)
				}
				if how == "kill" {
					_ = c.cmd.Process.Kill()
				}
				c.in.Close()
				_ = c.cmd.Wait()
				deadline := time.Now().Add(10 * time.Second)
				for onHost(marker) {
					if time.Now().After(deadline) {
						t.Fatal("a process survived the server")
					}
				}
				if how == "kill" {
					serve(t, users()[filepath.Base(t.Name())]) // the next server removes the groups
				}
				if left := groups(pid); len(left) > 0 {
					t.Errorf("control groups are left: %s", left)
				}
			})
		})
	}
}
