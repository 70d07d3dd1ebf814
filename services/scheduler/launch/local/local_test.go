package local_test

import (
	"bufio"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/launch/local"
)

// start runs a shell script and returns the process with the lines that it writes to descriptor 3, as they come.
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
		Env:  []string{"GREETING=hello", "PATH=/bin:/usr/bin", "OUT=" + out}, Log: filepath.Join(dir, "worker.log"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop(0) })
	return p, lines
}

func line(t *testing.T, lines <-chan string) string {
	t.Helper()
	select {
	case text := <-lines:
		return text
	case <-time.After(2 * time.Minute):
		t.Fatal("the process says nothing")
		return ""
	}
}

func TestEnvironmentAndExitCode(t *testing.T) {
	t.Parallel()
	p, lines := start(t, `echo $GREETING >&3; exit 3`)
	if got := line(t, lines); got != "hello" {
		t.Fatalf("said %q", got)
	}
	if e := p.Exit(); e.Code != launch.FencedCode || e.Signal != "" || e.String() != "left as fenced (exit code 3)" {
		t.Fatalf("exit %+v", e)
	}
}

func TestLastLinesOfThisProcessAlone(t *testing.T) {
	t.Parallel()
	log := filepath.Join(t.TempDir(), "worker.log")
	if err := os.WriteFile(log, []byte("of an earlier process\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(script string) []string {
		p, err := local.Launcher{}.Launch(launch.Command{Args: []string{"/bin/sh", "-c", script}, Log: log})
		if err != nil {
			t.Fatal(err)
		}
		return p.Exit().LastLines
	}
	if got := run(`echo out; echo err >&2`); !slices.Equal(got, []string{"out", "err"}) {
		t.Errorf("last lines %q", got)
	}
	if got := run(`i=0; while [ $i -lt 50 ]; do i=$((i+1)); echo line $i; done`); len(got) != launch.LastLines || got[0] != "line 31" || got[19] != "line 50" {
		t.Errorf("last lines %q", got)
	}
	if got := run(`exit 1`); len(got) != 0 {
		t.Errorf("last lines of a silent process %q", got)
	}
}

// A worker sees no end of file on its standard input while its supervisor lives.
func TestStdinIsHeldOpen(t *testing.T) {
	t.Parallel()
	p, lines := start(t, `trap 'echo held >&3; exit 0' TERM; exec 4<&0; (cat >/dev/null; echo stdin ended >&3) <&4 & sleep 0.05; echo up >&3
		while :; do sleep 0.01; done`)
	if got := line(t, lines); got != "up" {
		t.Fatalf("said %q", got)
	}
	p.Stop(30 * time.Second)
	if got := line(t, lines); got != "held" {
		t.Fatalf("said %q", got)
	}
}

func TestStopDrains(t *testing.T) {
	t.Parallel()
	p, lines := start(t, `trap 'echo draining >&3; exit 0' TERM; echo up >&3; while :; do sleep 0.01; done`)
	line(t, lines)
	p.Stop(30 * time.Second)
	if e := p.Exit(); e.Code != 0 || line(t, lines) != "draining" {
		t.Fatalf("exit %+v", e)
	}
	p.Stop(0) // once more does nothing
}

// A worker that does not drain is ended hard, and with it all that it started.
func TestStopEndsTheWholeGroup(t *testing.T) {
	t.Parallel()
	p, lines := start(t, `trap '' TERM; sleep 1000 & echo up >&3; while :; do sleep 0.01; done`)
	line(t, lines)
	p.Stop(10 * time.Millisecond)
	if e := p.Exit(); e.Signal != "killed" || e.Code != -1 {
		t.Fatalf("exit %+v", e)
	}
	for range lines { // until nobody holds descriptor 3 any more, and sleep would for long
	}
}

// What a worker started does not outlive it, however it ends.
func TestExitEndsTheWholeGroup(t *testing.T) {
	t.Parallel()
	p, lines := start(t, `sleep 1000 & echo up >&3; exit 5`)
	if got := line(t, lines); got != "up" || p.Exit().Code != 5 {
		t.Fatalf("said %q, exit %+v", got, p.Exit())
	}
	if got := line(t, lines); got != "" { // the end: nobody holds descriptor 3 any more
		t.Fatalf("said %q", got)
	}
}

func TestOwnProcessGroup(t *testing.T) {
	t.Parallel()
	p, lines := start(t, `echo up >&3; cat`)
	line(t, lines)
	if group, err := syscall.Getpgid(p.PID()); err != nil || group != p.PID() {
		t.Fatalf("group %d of process %d, %v", group, p.PID(), err)
	}
	p.Stop(10 * time.Second)
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	log := filepath.Join(t.TempDir(), "worker.log")
	for name, c := range map[string]launch.Command{
		"no command":  {Log: log},
		"no such":     {Args: []string{"/no/such/worker"}, Log: log},
		"no log":      {Args: []string{"/bin/true"}, Log: filepath.Join(log, "nested")},
		"not allowed": {Args: []string{t.TempDir()}, Log: log},
	} {
		if p, err := (local.Launcher{}).Launch(c); err == nil {
			p.Stop(0)
			t.Errorf("%s was started", name)
		}
	}
}
