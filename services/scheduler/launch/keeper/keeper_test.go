package keeper_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/launch/keeper"
	"github.com/rollout-rl/rollout/services/scheduler/launch/launchtest"
)

// roleVariable makes this test binary a keeper, or a scheduler that launches the command in it
// (JSON) and waits until it is killed.
const roleVariable = "KEEPER_TEST_ROLE"

// scheduler is what such a scheduler does.
type scheduler struct {
	Command launch.Command
	Grace   time.Duration
}

func TestMain(m *testing.M) {
	interrupt := make(chan os.Signal, 1)
	switch role := os.Getenv(roleVariable); role {
	case "":
		os.Exit(m.Run())
	case "keeper":
		signal.Notify(interrupt, syscall.SIGTERM)
		if err := keeper.Serve(interrupt); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	default:
		var s scheduler
		err := json.Unmarshal([]byte(role), &s)
		var p launch.Process
		if err == nil {
			p, err = launcher(1, s.Grace).Launch(s.Command)
		}
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		fmt.Println(handleOf(p))
		signal.Notify(interrupt, os.Interrupt)
		<-interrupt
	}
}

func handleOf(p launch.Process) string {
	kept, ok := p.(launch.Kept)
	if !ok {
		return ""
	}
	return kept.Handle()
}

func launcher(epoch uint64, grace time.Duration) keeper.Launcher {
	host := &keeper.Host{Program: []string{"/usr/bin/env", roleVariable + "=keeper", os.Args[0]}}
	return keeper.Launcher{Host: host, Epoch: epoch, Grace: grace}
}

// keeping keeps every process.
type keeping struct{ keeper.Launcher }

func (k keeping) Launch(c launch.Command) (launch.Process, error) {
	c.Keep = true
	return k.Launcher.Launch(c)
}

func TestLauncher(t *testing.T) {
	t.Parallel()
	launchtest.Run(t, keeping{launcher(0, 0)}, nil)
}

// worker is a process that a scheduler in another process has started.
type worker struct {
	*testing.T
	launch.Command
	folder    string
	handle    string
	scheduler *exec.Cmd
}

// begin starts a scheduler with a worker that runs a script with the variable FOLDER.
func begin(t *testing.T, grace time.Duration, script string) *worker {
	t.Helper()
	w := &worker{T: t, folder: t.TempDir()}
	w.Command = launch.Command{
		Args: []string{"/bin/sh", "-c", script}, Env: []string{"PATH=/bin:/usr/bin", "FOLDER=" + w.folder},
		Log: filepath.Join(w.folder, "log"), Keep: true,
	}
	role, err := json.Marshal(scheduler{w.Command, grace})
	if err != nil {
		t.Fatal(err)
	}
	w.scheduler = exec.Command(os.Args[0])
	w.scheduler.Env = append(os.Environ(), roleVariable+"="+string(role))
	out, err := w.scheduler.StdoutPipe()
	if err == nil {
		err = w.scheduler.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if w.handle = strings.TrimSpace(line); err != nil || !strings.Contains(line, "#") {
		t.Fatalf("the scheduler printed %q, %v", line, err)
	}
	return w
}

// kill kills the scheduler.
func (w *worker) kill() {
	_ = w.scheduler.Process.Kill()
	_ = w.scheduler.Wait()
}

// adopt is the worker as another scheduler adopts it.
func (w *worker) adopt(epoch uint64) launch.Process {
	w.Helper()
	p, err := launcher(epoch, 0).Adopt(w.handle)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { p.Stop(0) })
	return p
}

func (w *worker) read(name string) string {
	text, _ := os.ReadFile(filepath.Join(w.folder, name))
	return strings.TrimSpace(string(text))
}

func (w *worker) until(what string, reached func() bool) {
	w.Helper()
	deadline := time.After(2 * time.Minute)
	for !reached() {
		select {
		case <-time.After(5 * time.Millisecond):
		case <-deadline:
			w.Fatalf("waited for %s", what)
		}
	}
}

// gone reports whether a process has exited.
func gone(pid string) bool {
	n, err := strconv.Atoi(pid)
	return err == nil && errors.Is(syscall.Kill(n, 0), syscall.ESRCH)
}

// The worker of a killed scheduler continues under another one, which stops it and reads its last
// words.
func TestAdoptedWorkerContinues(t *testing.T) {
	t.Parallel()
	w := begin(t, 0, `trap 'echo draining; exit 4' TERM; echo $$ >$FOLDER/pid; while :; do sleep 0.01; done`)
	w.until("the worker", func() bool { return w.read("pid") != "" })
	w.kill()
	p := w.adopt(2)
	if got := strconv.Itoa(launch.PID(p)); got != w.read("pid") {
		t.Errorf("process %s was adopted, the worker is %s", got, w.read("pid"))
	}
	select {
	case <-p.Done():
		t.Fatalf("it exited: %+v", p.Exit())
	case <-time.After(50 * time.Millisecond):
	}
	p.Stop(time.Minute)
	if e := p.Exit(); e.Code != 4 || !slices.Equal(e.LastLines, []string{"draining"}) {
		t.Errorf("exit %+v", e)
	}
	if _, err := launcher(3, 0).Adopt(w.handle); !errors.Is(err, launch.ErrGone) {
		t.Errorf("adopting it after its exit was reported: %v", err)
	}
}

// Nothing is left of a scheduler that no one replaces: neither its workers, nor their children, nor
// the keeper.
func TestOrphansAreStopped(t *testing.T) {
	t.Parallel()
	w := begin(t, 20*time.Millisecond, `trap '' TERM; sleep 1000 & echo $! >$FOLDER/child; echo $PPID >$FOLDER/keeper; echo $$ >$FOLDER/pid; wait; while :; do sleep 0.01; done`)
	w.until("the worker", func() bool { return w.read("pid") != "" })
	w.kill()
	for _, name := range []string{"pid", "child", "keeper"} {
		w.until("the end of the "+name, func() bool { return gone(w.read(name)) })
	}
	socket, _, _ := strings.Cut(w.handle, "#")
	if _, err := os.Stat(filepath.Dir(socket)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder of the socket: %v", err)
	}
}

// A leader that was stopped, and continues when another one has adopted its workers, cannot stop
// them or take them back.
func TestFormerLeaderDoesNotTouchWorkers(t *testing.T) {
	t.Parallel()
	old := launcher(5, time.Minute)
	c := launch.Command{Args: []string{"/bin/sh", "-c", "cat"}, Env: []string{"PATH=/bin:/usr/bin"}, Log: filepath.Join(t.TempDir(), "log"), Keep: true}
	mine, err := old.Launch(c)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := launcher(6, 0).Adopt(handleOf(mine))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := old.Adopt(handleOf(mine)); !errors.Is(err, launch.ErrGone) || !strings.Contains(err.Error(), "leader 6 owns") {
		t.Errorf("the former leader adopts the worker: %v", err)
	}
	mine.Stop(0)
	if e := mine.Exit(); e.Code != 0 || e.Signal != "" {
		t.Errorf("the former leader observed %+v", e)
	}
	select {
	case <-theirs.Done():
		t.Fatalf("the former leader stopped the worker: %+v", theirs.Exit())
	case <-mine.Done():
		t.Fatal("the former leader observed an exit")
	case <-time.After(50 * time.Millisecond):
	}
	theirs.Stop(time.Minute)
	if e := theirs.Exit(); e.Signal != "terminated" {
		t.Errorf("exit %+v", e)
	}
}

// A scheduler that stops hands its worker over for a shorter time than one that dies.
func TestHandedOverWorkerWaitsForALimitedTime(t *testing.T) {
	t.Parallel()
	c := launch.Command{Args: []string{"/bin/sh", "-c", "cat"}, Env: []string{"PATH=/bin:/usr/bin"}, Log: filepath.Join(t.TempDir(), "log"), Keep: true}
	l := launcher(1, time.Hour)
	p, err := l.Launch(c)
	if err != nil {
		t.Fatal(err)
	}
	handle, pid := handleOf(p), strconv.Itoa(launch.PID(p))
	if !launch.Leave(p, launch.ErrRelease) {
		t.Fatal("a kept process was not left")
	}
	if p, err = l.Adopt(handle); err != nil {
		t.Fatal(err)
	}
	if kept, ok := p.(launch.Kept); ok {
		kept.Release(time.Millisecond)
	}
	w := &worker{T: t}
	w.until("the end of the worker", func() bool { return gone(pid) })
}

// A worker that exits while no scheduler owns it is reported to the one that adopts it.
func TestExitOfAnOrphanIsReported(t *testing.T) {
	t.Parallel()
	w := begin(t, time.Minute, `echo $$ >$FOLDER/pid; until [ -e $FOLDER/leave ]; do sleep 0.01; done; echo bye; exit 3`)
	w.until("the worker", func() bool { return w.read("pid") != "" })
	w.kill()
	if err := os.WriteFile(filepath.Join(w.folder, "leave"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	w.until("its exit", func() bool { return gone(w.read("pid")) })
	if e := w.adopt(2).Exit(); e.Code != launch.FencedCode || !slices.Equal(e.LastLines, []string{"bye"}) {
		t.Errorf("exit %+v", e)
	}
}

// A killed keeper is an exit of its workers, which see the end of their standard input.
func TestKilledKeeperEndsItsWorkers(t *testing.T) {
	t.Parallel()
	w := begin(t, time.Minute, `echo $PPID >$FOLDER/keeper; cat; echo ended >$FOLDER/stdin`)
	w.until("the worker", func() bool { return w.read("keeper") != "" })
	p := w.adopt(2)
	pid, err := strconv.Atoi(w.read("keeper"))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if e := p.Exit(); e.Code != -1 || !slices.Equal(e.LastLines, []string{"the keeper of this worker was killed"}) {
		t.Errorf("exit %+v", e)
	}
	w.until("the end of its standard input", func() bool { return w.read("stdin") == "ended" })
}
