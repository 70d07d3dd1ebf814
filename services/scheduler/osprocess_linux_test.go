package scheduler

import (
	"fmt"
	"os/exec"
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
