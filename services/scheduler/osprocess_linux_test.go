package scheduler

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// A worker whose child is stopped can't go on, whatever the worker itself does.
func TestAStoppedChildOfAWorkerIsNamed(t *testing.T) {
	t.Parallel()
	parent := exec.Command("sh", "-c", "sleep 600 & echo $!; wait")
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	var child int
	if _, err := fmt.Fscan(out, &child); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(child, syscall.SIGKILL)
		_ = parent.Wait()
	})
	worker := &runv1.Worker{WorkerId: "learner-0", Pid: uint32(parent.Process.Pid)}
	if waits := readProcesses().waits(worker); len(waits) > 0 {
		t.Fatalf("nothing is stopped: %v", waits)
	}
	for command(child) != "sleep 600" { // the shell has forked, and has not executed it yet
		<-time.After(time.Millisecond)
	}
	if err := syscall.Kill(child, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for {
		waits := readProcesses().waits(worker)
		if len(waits) == 0 { // the signal is on its way
			<-time.After(time.Millisecond)
			continue
		}
		want := fmt.Sprintf("process %d of learner-0 (sleep 600) is stopped by a signal or a debugger", child)
		if w := waits[0]; w.GetReason() != "WORKER_STOPPED" || w.GetEvidence() != want || !strings.Contains(w.GetFix(), fmt.Sprint("kill -CONT ", child)) {
			t.Errorf("got %v", w)
		}
		return
	}
}

// A paused container looks to the kernel as if it waited for a disk.
func TestAFrozenWorkerIsNamed(t *testing.T) {
	t.Parallel()
	group, procs, freeze, on, off := cgroups+"/rollout-test-frozen", "cgroup.procs", "cgroup.freeze", "1", "0"
	if _, err := os.Stat(cgroups + "/freezer"); err == nil {
		group, freeze, on, off = cgroups+"/freezer/rollout-test-frozen", "freezer.state", "FROZEN", "THAWED"
	}
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Skip("control groups can't be made here: ", err)
	}
	process := exec.Command("sleep", "600")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	write := func(file, text string) {
		if err := os.WriteFile(group+"/"+file, []byte(text), 0o600); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(func() {
		write(freeze, off)
		_ = process.Process.Kill()
		_ = process.Wait()
		for range 200 {
			if os.Remove(group) == nil {
				return
			}
			<-time.After(10 * time.Millisecond)
		}
		t.Error("the control group remains")
	})
	worker := &runv1.Worker{WorkerId: "learner-0", Pid: uint32(process.Process.Pid)}
	if waits := readProcesses().waits(worker); len(waits) > 0 {
		t.Fatalf("nothing is frozen: %v", waits)
	}
	write(procs, fmt.Sprint(process.Process.Pid))
	write(freeze, on)
	waits := readProcesses().waits(worker)
	want := fmt.Sprintf("the process of learner-0 (%d) is frozen by its control group ", process.Process.Pid)
	if len(waits) != 1 || waits[0].GetReason() != "WORKER_STOPPED" || !strings.HasPrefix(waits[0].GetEvidence(), want) {
		t.Fatalf("got %v", waits)
	}
	if fix := fmt.Sprintf("`echo %s > %s/%s`", off, group, freeze); !strings.HasSuffix(waits[0].GetFix(), fix) {
		t.Errorf("got %s, want %s", waits[0].GetFix(), fix)
	}
}

// A signal does not continue a process that a debugger has stopped.
func TestTheDebuggerOfAWorkerIsNamed(t *testing.T) {
	t.Parallel()
	runtime.LockOSThread() // the thread is the debugger
	defer runtime.UnlockOSThread()
	process := exec.Command("sleep", "600")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	pid := process.Process.Pid
	defer func() {
		_ = process.Process.Kill()
		_ = process.Wait()
	}()
	if err := syscall.PtraceAttach(pid); err != nil {
		t.Skip("processes can't be traced here: ", err)
	}
	defer func() { _ = syscall.PtraceDetach(pid) }()
	if _, err := syscall.Wait4(pid, nil, syscall.WALL, nil); err != nil {
		t.Fatal(err)
	}
	waits := readProcesses().waits(&runv1.Worker{WorkerId: "learner-0", Pid: uint32(pid)})
	want := fmt.Sprintf("the process of learner-0 (%d) is stopped by a debugger, the process %d (", pid, syscall.Gettid())
	if len(waits) != 1 || !strings.HasPrefix(waits[0].GetEvidence(), want) || !strings.Contains(waits[0].GetFix(), fmt.Sprintf("`kill %d`", syscall.Gettid())) {
		t.Fatalf("got %v, want %s", waits, want)
	}
	if err := process.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	want = fmt.Sprintf("the process of learner-0 (%d) was killed, and a debugger, the process %d (", pid, syscall.Gettid())
	for deadline := time.Now().Add(10 * time.Second); ; <-time.After(10 * time.Millisecond) {
		if waits = readProcesses().waits(&runv1.Worker{WorkerId: "learner-0", Pid: uint32(pid)}); len(waits) == 1 && strings.HasPrefix(waits[0].GetEvidence(), want) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("got %v, want %s", waits, want)
		}
	}
}
