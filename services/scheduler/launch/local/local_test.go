package local_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/launch/launchtest"
	"github.com/rollout-rl/rollout/services/scheduler/launch/local"
)

// orphanVariable makes this test binary launch the command that it holds (JSON) and wait until it
// is killed.
const orphanVariable = "LOCAL_TEST_ORPHAN"

func TestMain(m *testing.M) {
	if text := os.Getenv(orphanVariable); text != "" {
		var c launch.Command
		err := json.Unmarshal([]byte(text), &c)
		if err == nil {
			_, err = local.Launcher{}.Launch(c)
		}
		fmt.Println(err)
		interrupt := make(chan os.Signal, 1)
		signal.Notify(interrupt, os.Interrupt)
		<-interrupt
	}
	os.Exit(m.Run())
}

func TestLauncher(t *testing.T) {
	t.Parallel()
	launchtest.Run(t, local.Launcher{}, func(t *testing.T, c launch.Command) {
		text, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		other := exec.Command(os.Args[0])
		other.Env = append(os.Environ(), orphanVariable+"="+string(text))
		out, err := other.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		said, err := bufio.NewReader(out).ReadString('\n')
		if said != "<nil>\n" || err != nil {
			t.Errorf("launch in another process: %q, %v", said, err)
		}
		_ = other.Process.Kill()
		_ = other.Wait()
	})
}

// start runs a shell script and returns the process with the lines that it writes to descriptor 3.
func start(t *testing.T, script string) (launch.Process, <-chan string) {
	t.Helper()
	dir := t.TempDir()
	out := filepath.Join(dir, "out")
	if err := syscall.Mkfifo(out, 0o600); err != nil {
		t.Fatal(err)
	}
	lines := make(chan string, 100)
	go func() {
		defer close(lines)
		f, err := os.Open(out)
		if err != nil {
			return
		}
		defer f.Close()
		for s := bufio.NewScanner(f); s.Scan(); {
			lines <- s.Text()
		}
	}()
	p, err := local.Launcher{}.Launch(launch.Command{
		Args: []string{"/bin/sh", "-c", `exec 3>"$OUT"; ` + script},
		Env:  []string{"PATH=/bin:/usr/bin", "OUT=" + out}, Log: filepath.Join(dir, "worker.log"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop(0) })
	return p, lines
}

// line is the next line; "" once no process has descriptor 3 open.
func line(t *testing.T, lines <-chan string) string {
	t.Helper()
	select {
	case text := <-lines:
		return text
	case <-time.After(2 * time.Minute):
		t.Fatal("no output from the process")
		return ""
	}
}

func TestStopKillsTheWholeProcessGroup(t *testing.T) {
	t.Parallel()
	p, lines := start(t, `trap '' TERM; sleep 1000 & echo up >&3; while :; do sleep 0.01; done`)
	line(t, lines)
	p.Stop(10 * time.Millisecond)
	if e := p.Exit(); e.Signal != "killed" || e.Code != -1 {
		t.Fatalf("exit %+v", e)
	}
	for range lines { // ends once sleep, which has descriptor 3 too, was killed
	}
}

// Descendants of a worker do not outlive it.
func TestExitKillsTheWholeProcessGroup(t *testing.T) {
	t.Parallel()
	p, lines := start(t, `sleep 1000 & echo up >&3; exit 5`)
	if got := line(t, lines); got != "up" || p.Exit().Code != 5 {
		t.Fatalf("output %q, exit %+v", got, p.Exit())
	}
	if got := line(t, lines); got != "" {
		t.Fatalf("output %q", got)
	}
}

// A descendant that left the group and keeps the output open does not delay the exit for long.
func TestExitDoesNotWaitForStrayDescendants(t *testing.T) {
	t.Parallel()
	p, lines := start(t, `setsid sleep 20 3>&- & echo up >&3; echo last; exit 5`)
	line(t, lines)
	select {
	case <-p.Done():
	case <-time.After(15 * time.Second):
		t.Fatal("the exit waits for a descendant")
	}
	if e := p.Exit(); e.Code != 5 || len(e.LastLines) != 1 || e.LastLines[0] != "last" {
		t.Errorf("exit %+v", e)
	}
}

func TestProcessLeadsItsGroup(t *testing.T) {
	t.Parallel()
	p, lines := start(t, `echo up >&3; cat`)
	line(t, lines)
	pid := launch.PID(p)
	if group, err := syscall.Getpgid(pid); err != nil || group != pid {
		t.Fatalf("group %d of process %d, %v", group, pid, err)
	}
	p.Stop(10 * time.Second)
}
