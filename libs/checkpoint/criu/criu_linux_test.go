package criu_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rollout-rl/rollout/libs/checkpoint"
	"github.com/rollout-rl/rollout/libs/checkpoint/criu"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "init" {
		os.Exit(criu.Init())
	}
	os.Exit(m.Run())
}

// setup returns the Checkpointer of this host, or skips the test and says why.
func setup(t *testing.T) *criu.Checkpointer {
	t.Helper()
	program, err := filepath.Abs("../../../.tools/criu/criu")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(program); err != nil {
		t.Skip("criu is not built: run scripts/criu")
	}
	if os.Geteuid() != 0 {
		t.Skip("CRIU saves processes as root, and this is another user")
	}
	return criu.New(program, os.Args[0], "init")
}

// counter counts the lines that it reads from its socket, descriptor 3, in memory, and answers each
// with the number. A thread waits for nothing.
const counter = `
import os, socket, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
s = socket.socket(fileno=3)
seen, rows = 0, s.makefile("rw")
for row in rows:
    seen += 1
    if row == "fork\n":
        if os.fork() == 0:
            threading.Event().wait()
    if row == "exit\n":
        os._exit(7)
    rows.write(f"{seen} {os.getpid()}\n")
    rows.flush()
`

// target is a process that counts.
type target struct {
	t    *testing.T
	pid  int
	conn net.Conn
	rows *bufio.Reader
}

func connection(t *testing.T) (net.Conn, *os.File) {
	t.Helper()
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours := os.NewFile(uintptr(pair[0]), "ours")
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "theirs")
	t.Cleanup(func() { conn.Close(); theirs.Close() })
	return conn, theirs
}

func count(t *testing.T, attr syscall.SysProcAttr, before ...string) target {
	t.Helper()
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("this host has no python3")
	}
	conn, theirs := connection(t)
	attr.Setsid = true
	cmd := exec.Command("python3", "-S", "-c", strings.Join(before, "\n")+counter)
	cmd.SysProcAttr, cmd.ExtraFiles, cmd.Stderr = &attr, []*os.File{theirs}, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	t.Cleanup(func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); _ = cmd.Wait() }) // and its child
	return target{t: t, pid: cmd.Process.Pid, conn: conn, rows: bufio.NewReader(conn)}
}

func (c target) ask(row string) (seen, pid int) {
	c.t.Helper()
	_ = c.conn.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := fmt.Fprintln(c.conn, row); err != nil {
		c.t.Fatal(err)
	}
	if _, err := fmt.Fscanln(c.rows, &seen, &pid); err != nil {
		c.t.Fatalf("%s: %v", row, err)
	}
	return seen, pid
}

// restore continues an image with a new connection and the standard error of this process.
func restore(t *testing.T, c *criu.Checkpointer, dir, network string) (target, checkpoint.Process) {
	t.Helper()
	image, err := checkpoint.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	conn, theirs := connection(t)
	streams := map[string]*os.File{}
	for _, s := range image.Streams {
		streams[s.ID] = os.Stderr
		if s.Kind == "socket" {
			streams[s.ID] = theirs
		}
	}
	p, err := c.Restore(t.Context(), dir, checkpoint.Restore{Streams: streams, Network: network})
	if err != nil {
		t.Fatalf("restore: %v", err)
	}
	theirs.Close()
	t.Cleanup(p.Kill)
	return target{t: t, pid: p.PID(), conn: conn, rows: bufio.NewReader(conn)}, p
}

func reason(t *testing.T, err error, want string) *checkpoint.Error {
	t.Helper()
	var typed *checkpoint.Error
	if !errors.As(err, &typed) || typed.Reason != want {
		t.Fatalf("got %v, want an error with reason %s", err, want)
	}
	if typed.Fix == "" {
		t.Errorf("no fix: %s", typed.Message)
	}
	return typed
}

func TestAProbeSavesAndRestoresAProcess(t *testing.T) {
	t.Parallel()
	c := setup(t)
	if r := c.Probe(t.Context()); !r.OK || r.Version == "" || r.Seconds == 0 {
		t.Fatalf("%+v: %v", r, r.Error)
	}
	if r := criu.New("").Probe(t.Context()); r.OK || r.Error.Reason != checkpoint.ReasonUnavailable || !strings.Contains(r.Error.Fix, "scripts/criu") {
		t.Errorf("without criu: %+v", r)
	}
	old := filepath.Join(t.TempDir(), "criu")
	if err := os.WriteFile(old, []byte("#!/bin/sh\necho Version: 3.17.1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if r := criu.New(old).Probe(t.Context()); r.OK || !strings.Contains(r.Error.Message, "3.17.1") {
		t.Errorf("with an old criu: %+v", r)
	}
}

func TestAProcessContinuesWithItsMemory(t *testing.T) {
	t.Parallel()
	c := setup(t)
	was := count(t, syscall.SysProcAttr{})
	was.ask("one")
	_, inner := was.ask("two")
	dir := filepath.Join(t.TempDir(), "image")
	image, err := c.Dump(t.Context(), was.pid, dir, false)
	if err != nil {
		t.Fatal(err)
	}
	if s, ok := image.Stream(3); !ok || s.Kind != "socket" {
		t.Errorf("streams: %+v", image.Streams)
	}
	if _, err := was.rows.ReadString('\n'); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the saved process did not end: %v", err)
	}

	// The image continues as often as it is restored, and each copy has its memory.
	for range 2 {
		is, p := restore(t, c, dir, "")
		if seen, pid := is.ask("three"); seen != 3 || pid != inner {
			t.Errorf("after the restore: row %d in process %d, want 3 in %d", seen, pid, inner)
		}
		fmt.Fprintln(is.conn, "exit")
		if code := p.Wait(); code != 7 {
			t.Errorf("exit code %d, want 7", code)
		}
	}
}

func TestASavedProcessMayContinueAndARestoredOneIsSavedAgain(t *testing.T) {
	t.Parallel()
	c := setup(t)
	was := count(t, syscall.SysProcAttr{})
	was.ask("fork") // a child, which is saved too
	first, second := filepath.Join(t.TempDir(), "1"), filepath.Join(t.TempDir(), "2")
	image, err := c.Dump(t.Context(), was.pid, first, true)
	if err != nil {
		t.Fatal(err)
	}
	if len(image.Processes) != 2 {
		t.Errorf("processes: %+v", image.Processes)
	}
	if seen, _ := was.ask("continue"); seen != 2 {
		t.Errorf("the saved process counted %d, want 2", seen)
	}
	is, _ := restore(t, c, first, "")
	if seen, _ := is.ask("b"); seen != 2 {
		t.Errorf("the first copy counted %d, want 2", seen)
	}
	if _, err := c.Dump(t.Context(), is.pid, second, true); err != nil {
		t.Fatal(err)
	}
	again, _ := restore(t, c, second, "")
	if seen, _ := again.ask("c"); seen != 3 {
		t.Errorf("the second copy counted %d, want 3", seen)
	}
}

// A network namespace stands for another host: its loopback has no port of the first one.
func TestAProcessMovesToAnotherNetwork(t *testing.T) {
	t.Parallel()
	c := setup(t)
	const listen = `
import socket as sockets
server = sockets.socket(); server.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", 18467)); server.listen()
`
	first, second := network(t), network(t)
	var was target
	in(t, first, func() { was = count(t, syscall.SysProcAttr{}, listen) })
	was.ask("one")
	dir := filepath.Join(t.TempDir(), "image")
	if _, err := c.Dump(t.Context(), was.pid, dir, false); err != nil {
		t.Fatal(err)
	}
	is, _ := restore(t, c, dir, second)
	if seen, _ := is.ask("two"); seen != 2 {
		t.Errorf("it counted %d, want 2", seen)
	}
	for name, namespace := range map[string]string{"first": first, "second": second} {
		out, err := exec.Command("nsenter", "--net="+namespace, "python3", "-c", `import socket; socket.create_connection(("127.0.0.1", 18467), 5)`).CombinedOutput()
		if reached := err == nil; reached != (name == "second") {
			t.Errorf("the port in the %s network: reached %v: %s", name, reached, out)
		}
	}
	inside, err := os.Stat(fmt.Sprintf("/proc/%d/ns/net", is.pid))
	if err != nil {
		t.Fatal(err)
	}
	if want, err := os.Stat(second); err != nil || !os.SameFile(inside, want) {
		t.Errorf("the restored process is not in the second network: %v", err)
	}
}

// network makes a network namespace whose loopback is up, and returns its path.
func network(t *testing.T) string {
	t.Helper()
	keeper := exec.Command("unshare", "--net", "--kill-child", "sh", "-c", "ip link set lo up 2>/dev/null || ifconfig lo up; echo ready; exec sleep 300")
	out, err := keeper.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := keeper.Start(); err != nil {
		t.Skipf("this host has no unshare: %v", err)
	}
	t.Cleanup(func() { _ = keeper.Process.Kill(); _ = keeper.Wait() })
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("/proc/%d/ns/net", keeper.Process.Pid)
}

// in runs a function in a network namespace.
func in(t *testing.T, namespace string, run func()) {
	t.Helper()
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // and not unlocked: the thread ends
		f, err := os.Open(namespace)
		if err == nil {
			err = unix.Setns(int(f.Fd()), unix.CLONE_NEWNET)
			f.Close()
		}
		if err == nil {
			run()
		}
		failed <- err
	}()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
}

// CRIU restores a process without its Landlock rules and reports success, so such a process is
// refused before it is touched.
func TestAConfinedProcessIsRefused(t *testing.T) {
	t.Parallel()
	c := setup(t)
	for name, process := range map[string]target{
		"no_new_privs":   count(t, syscall.SysProcAttr{}, "import ctypes; ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)"),
		"user namespace": count(t, syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER}),
	} {
		process.ask("one")
		dir := filepath.Join(t.TempDir(), "image")
		_, err := c.Dump(t.Context(), process.pid, dir, false)
		if e := reason(t, err, checkpoint.ReasonConfined); !strings.Contains(e.Message, "Landlock") {
			t.Errorf("%s: %s", name, e.Message)
		}
		if seen, _ := process.ask("two"); seen != 2 {
			t.Errorf("%s: the refused process does not continue", name)
		}
		if left, _ := filepath.Glob(dir + "*"); len(left) > 0 {
			t.Errorf("%s: %q were left", name, left)
		}
	}
}

// A filter of system calls is in force again, or nothing runs.
func TestALimitIsInForceAgainOrTheRestoreIsRefused(t *testing.T) {
	t.Parallel()
	c := setup(t)
	// Root may install a filter without no_new_privs. It denies mkdir (83 on x86-64).
	const filter = `
import ctypes, os, struct
rules = struct.pack("<HBBI", 0x20, 0, 0, 0) + struct.pack("<HBBI", 0x15, 0, 1, 83) + struct.pack("<HBBI", 0x06, 0, 0, 0x50001) + struct.pack("<HBBI", 0x06, 0, 0, 0x7fff0000)
code = ctypes.create_string_buffer(rules)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
assert ctypes.CDLL(None).prctl(22, 2, ctypes.byref(Program(4, ctypes.addressof(code)))) == 0
`
	was := count(t, syscall.SysProcAttr{}, filter)
	was.ask("one")
	dir := filepath.Join(t.TempDir(), "image")
	image, err := c.Dump(t.Context(), was.pid, dir, false)
	if err != nil {
		t.Fatal(err)
	}
	if got := image.Processes[0].Limits["Seccomp"]; got != "2" {
		t.Fatalf("the filter was not installed: Seccomp is %s", got)
	}
	is, _ := restore(t, c, dir, "")
	if seen, _ := is.ask("two"); seen != 2 {
		t.Errorf("it counted %d, want 2", seen)
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", is.pid))
	if err != nil || !strings.Contains(string(raw), "Seccomp:\t2") {
		t.Errorf("the restored process has no filter: %v %s", err, raw)
	}

	// An image whose process had a limit that the restored one has not.
	image.Processes[0].Limits["Seccomp_filters"] = "2"
	if err := os.Remove(filepath.Join(dir, "process.json")); err != nil {
		t.Fatal(err)
	}
	if _, err := checkpoint.Write(dir, image); err != nil {
		t.Fatal(err)
	}
	conn, theirs := connection(t)
	streams := map[string]*os.File{}
	for _, s := range image.Streams {
		streams[s.ID] = os.Stderr
		if s.Kind == "socket" {
			streams[s.ID] = theirs
		}
	}
	_, err = c.Restore(t.Context(), dir, checkpoint.Restore{Streams: streams})
	theirs.Close()
	if e := reason(t, err, checkpoint.ReasonLimits); !strings.Contains(e.Message, `Seccomp_filters was "2" and is "1"`) {
		t.Error(e.Message)
	}
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	if n, err := conn.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the refused process still runs: %v", err)
	}
}

func TestErrorsNameWhatToChange(t *testing.T) {
	t.Parallel()
	c := setup(t)
	_, err := c.Dump(t.Context(), 1<<22+1, filepath.Join(t.TempDir(), "image"), true)
	_ = reason(t, err, checkpoint.ReasonNotFound)

	opened := filepath.Join(t.TempDir(), "opened")
	if err := os.WriteFile(opened, []byte("as it was"), 0o600); err != nil {
		t.Fatal(err)
	}
	was := count(t, syscall.SysProcAttr{}, fmt.Sprintf("kept = open(%q)", opened))
	was.ask("one")
	dir := filepath.Join(t.TempDir(), "image")
	if _, err := c.Dump(t.Context(), was.pid, dir, true); err != nil {
		t.Fatal(err)
	}
	_, err = c.Dump(t.Context(), was.pid, dir, true)
	_ = reason(t, err, checkpoint.ReasonExists)
	_, err = c.Restore(t.Context(), dir, checkpoint.Restore{})
	if e := reason(t, err, checkpoint.ReasonStreams); !strings.Contains(e.Message, "socket") && !strings.Contains(e.Message, "descriptor") {
		t.Error(e.Message)
	}
	streams := map[string]*os.File{}
	image, err := checkpoint.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range image.Streams {
		streams[s.ID] = os.Stderr
	}
	if err := os.WriteFile(opened, []byte("another size"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = c.Restore(t.Context(), dir, checkpoint.Restore{Streams: streams})
	if e := reason(t, err, checkpoint.ReasonFiles); !strings.Contains(e.Message, "bad size") {
		t.Error(e.Message)
	}
	if err := os.Remove(opened); err != nil {
		t.Fatal(err)
	}
	_, err = c.Restore(t.Context(), dir, checkpoint.Restore{Streams: streams})
	_ = reason(t, err, checkpoint.ReasonFiles)

	// Damage in any file is found before anything runs.
	i := slices.IndexFunc(image.Files, func(f checkpoint.File) bool { return strings.HasPrefix(f.Name, "pages-") })
	path := filepath.Join(dir, image.Files[i].Name)
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	raw[len(raw)/2] ^= 1
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = c.Restore(t.Context(), dir, checkpoint.Restore{Streams: streams})
	if e := reason(t, err, checkpoint.ReasonImage); !strings.Contains(e.Message, image.Files[i].Name) {
		t.Error(e.Message)
	}
}

// A process that began after the others were looked at is in the image, and nothing is known of its
// limits.
func TestAnImageWithAProcessThatIsNotDescribedIsRefused(t *testing.T) {
	t.Parallel()
	c := setup(t)
	was := count(t, syscall.SysProcAttr{})
	was.ask("fork")
	dir := filepath.Join(t.TempDir(), "image")
	image, err := c.Dump(t.Context(), was.pid, dir, true)
	if err != nil {
		t.Fatal(err)
	}
	image.Processes = image.Processes[:1]
	if err := os.Remove(filepath.Join(dir, "process.json")); err != nil {
		t.Fatal(err)
	}
	if _, err := checkpoint.Write(dir, image); err != nil {
		t.Fatal(err)
	}
	streams := map[string]*os.File{}
	for _, s := range image.Streams {
		streams[s.ID] = os.Stderr
		if s.Kind == "socket" {
			_, streams[s.ID] = connection(t)
		}
	}
	p, err := c.Restore(t.Context(), dir, checkpoint.Restore{Streams: streams})
	if err == nil {
		p.Kill()
	}
	_ = reason(t, err, checkpoint.ReasonLimits)
}

// A dump that has begun is completed when its caller gives up, because a CRIU that is killed takes
// the process with it. A restore ends with its caller.
func TestCallersThatGiveUp(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("CRIU saves processes as root, and this is another user")
	}
	folder := t.TempDir()
	program, dumps, restores, release := filepath.Join(folder, "criu"), filepath.Join(folder, "dumps"), filepath.Join(folder, "restores"), filepath.Join(folder, "release")
	script := fmt.Sprintf("#!/bin/sh\ncase $1 in\n--version) echo Version: 4.2;;\ndump) echo >%s; while ! test -e %s; do sleep 0.05; done; echo >%s.done;;\nrestore) echo >%s; exec sleep 1000;;\nesac\n",
		dumps, release, dumps, restores)
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	c := criu.New(program, os.Args[0], "init")
	target := exec.Command("sleep", "1000")
	if err := target.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = target.Process.Kill(); _ = target.Wait() })
	dump := func(ctx context.Context, name string) (checkpoint.Image, error) {
		return c.Dump(ctx, target.Process.Pid, filepath.Join(folder, name), true)
	}

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { _, err := dump(ctx, "first"); ended <- err }()
	appears(t, dumps)
	cancel()
	if err := os.WriteFile(release, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := within(t, ended); !errors.Is(err, context.Canceled) && !strings.Contains(fmt.Sprint(err), "canceled") {
		t.Errorf("the dump: %v", err)
	}
	if _, err := os.Stat(dumps + ".done"); err != nil {
		t.Errorf("the dump was not completed: %v", err)
	}

	image, err := dump(t.Context(), "second")
	if err != nil {
		t.Fatal(err)
	}
	streams := map[string]*os.File{}
	for _, s := range image.Streams {
		streams[s.ID] = os.Stderr
	}
	ctx, cancel = context.WithCancel(t.Context())
	go func() {
		_, err := c.Restore(ctx, filepath.Join(folder, "second"), checkpoint.Restore{Streams: streams})
		ended <- err
	}()
	appears(t, restores)
	cancel()
	if err := within(t, ended); err == nil {
		t.Error("the restore succeeded")
	}
}

func appears(t *testing.T, path string) {
	t.Helper()
	for range 2000 {
		if _, err := os.Stat(path); err == nil {
			return
		}
		<-time.After(20 * time.Millisecond)
	}
	t.Fatalf("%s does not appear", path)
}

func within(t *testing.T, ended <-chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(40 * time.Second):
		t.Fatal("the call does not end")
		return nil
	}
}
