// Package launchtest is the conformance suite of launch.Launcher.
package launchtest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// Kind is the kind of the workers that the suite starts.
const Kind = "inference"

// timeout bounds each wait of the suite.
const timeout = 2 * time.Minute

// Run checks a launcher that starts processes on this host or on one that shares its files.
//
// orphan starts a process through a launcher in another process, then kills that other process; the
// suite checks that the standard input of the orphan closes. A test binary can start itself again
// for this. nil: the launcher keeps processes, or the pipe belongs to a program with a test of its
// own.
func Run(t *testing.T, launcher launch.Launcher, orphan func(t *testing.T, c launch.Command)) {
	for name, test := range map[string]func(*testing.T, launch.Launcher){
		"a process gets its environment and directory": environment,
		"an exit has the code":                         exitCode,
		"an exit has the last lines of this process":   lastLines,
		"stop asks the process to exit":                stopAsks,
		"stop kills the process after the grace":       stopKills,
		"stop is idempotent":                           stopTwice,
		"stop after the exit keeps the exit":           stopAfterExit,
		"ids are stable and unique":                    ids,
		"standard input stays open":                    stdinOpen,
		"a command that cannot start is an error":      refusals,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, launcher)
		})
	}
	if orphan == nil {
		return
	}
	t.Run("standard input closes when the launcher's process dies", func(t *testing.T) {
		t.Parallel()
		said := filepath.Join(t.TempDir(), "said")
		orphan(t, command(t, "echo up >>"+said+"; cat >/dev/null; echo stdin closed >>"+said))
		until(t, func() bool { return read(said) == "up\nstdin closed\n" })
	})
}

func command(t *testing.T, script string, env ...string) launch.Command {
	t.Helper()
	return launch.Command{
		Worker: Kind + "-0", Kind: Kind, Args: []string{"/bin/sh", "-c", script}, Env: append([]string{"PATH=/bin:/usr/bin"}, env...),
		Log: filepath.Join(t.TempDir(), "worker.log"),
	}
}

func start(t *testing.T, launcher launch.Launcher, c launch.Command) launch.Process {
	t.Helper()
	p, err := launcher.Launch(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop(0) })
	return p
}

// ready starts a script that writes "up" to its log once it is ready to be stopped.
func ready(t *testing.T, launcher launch.Launcher, script string) launch.Process {
	t.Helper()
	c := command(t, script)
	p := start(t, launcher, c)
	until(t, func() bool { return strings.Contains(read(c.Log), "up\n") })
	return p
}

func read(file string) string {
	text, _ := os.ReadFile(file)
	return string(text)
}

func until(t *testing.T, reached func() bool) {
	t.Helper()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.After(timeout)
	for !reached() {
		select {
		case <-ticker.C:
		case <-deadline:
			t.Fatalf("not reached after %v", timeout)
		}
	}
}

func environment(t *testing.T, launcher launch.Launcher) {
	c := command(t, `echo $GREETING $HOME; pwd`, "GREETING=hello")
	c.Dir, _ = filepath.EvalSymlinks(t.TempDir())
	if got := start(t, launcher, c).Exit().LastLines; !slices.Equal(got, []string{"hello", c.Dir}) {
		t.Errorf("output %q", got)
	}
}

func exitCode(t *testing.T, launcher launch.Launcher) {
	p := start(t, launcher, command(t, "exit 3"))
	select {
	case <-p.Done():
	case <-time.After(timeout):
		t.Fatal("Done was not closed")
	}
	if e := p.Exit(); e.Code != launch.FencedCode || e.Signal != "" {
		t.Errorf("exit %+v", e)
	}
}

func lastLines(t *testing.T, launcher launch.Launcher) {
	c := command(t, `echo out; echo err >&2`)
	if err := os.WriteFile(c.Log, []byte("of an earlier process\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := start(t, launcher, c).Exit().LastLines; !slices.Equal(got, []string{"out", "err"}) {
		t.Errorf("last lines %q", got)
	}
	c.Args[2] = `i=0; while [ $i -lt 50 ]; do i=$((i+1)); echo line $i; done`
	if got := start(t, launcher, c).Exit().LastLines; len(got) != launch.LastLines || got[0] != "line 31" || got[19] != "line 50" {
		t.Errorf("last lines %q", got)
	}
	c.Args[2] = `exit 1`
	if got := start(t, launcher, c).Exit().LastLines; len(got) != 0 {
		t.Errorf("last lines of a process without output %q", got)
	}
}

func stopAsks(t *testing.T, launcher launch.Launcher) {
	p := ready(t, launcher, `trap 'echo draining; exit 0' TERM; echo up; while :; do sleep 0.01; done`)
	p.Stop(timeout)
	if e := p.Exit(); e.Code != 0 || !slices.Equal(e.LastLines, []string{"up", "draining"}) {
		t.Errorf("exit %+v", e)
	}
}

func stopKills(t *testing.T, launcher launch.Launcher) {
	p := ready(t, launcher, `trap '' TERM; echo up; while :; do sleep 0.01; done`)
	p.Stop(10 * time.Millisecond)
	if e := p.Exit(); e.Signal != "killed" || e.Code != -1 {
		t.Errorf("exit %+v", e)
	}
}

func stopTwice(t *testing.T, launcher launch.Launcher) {
	p := ready(t, launcher, `trap 'exit 4' TERM; echo up; while :; do sleep 0.01; done`)
	both := make(chan struct{}, 2)
	for range 2 {
		go func() { p.Stop(timeout); both <- struct{}{} }()
	}
	<-both
	<-both
	p.Stop(0)
	if e := p.Exit(); e.Code != 4 {
		t.Errorf("exit %+v", e)
	}
}

func stopAfterExit(t *testing.T, launcher launch.Launcher) {
	p := start(t, launcher, command(t, "exit 7"))
	<-p.Done()
	p.Stop(0)
	if e := p.Exit(); e.Code != 7 || e.Signal != "" {
		t.Errorf("exit %+v", e)
	}
}

func ids(t *testing.T, launcher launch.Launcher) {
	seen := map[string]bool{}
	for range 5 {
		p := start(t, launcher, command(t, "exit 0"))
		id := p.ID()
		<-p.Done()
		if id == "" || seen[id] || p.ID() != id {
			t.Errorf("id %q, then %q; earlier ones %v", id, p.ID(), seen)
		}
		seen[id] = true
	}
}

// The background reader would report the end of file first if the launcher closed the pipe while
// the process runs.
func stdinOpen(t *testing.T, launcher launch.Launcher) {
	p := ready(t, launcher, `trap 'echo open; exit 0' TERM; exec 4<&0; (cat >/dev/null; echo closed) <&4 & sleep 0.05; echo up
		while :; do sleep 0.01; done`)
	p.Stop(timeout)
	if got := p.Exit().LastLines; len(got) < 2 || !slices.Equal(got[:2], []string{"up", "open"}) {
		t.Errorf("output %q", got)
	}
}

func refusals(t *testing.T, launcher launch.Launcher) {
	log := filepath.Join(t.TempDir(), "worker.log")
	for name, c := range map[string]launch.Command{
		"no command":     {Log: log},
		"no such file":   {Args: []string{"/no/such/worker"}, Log: log},
		"no log":         {Args: []string{"/bin/true"}, Log: filepath.Join(log, "nested")},
		"not executable": {Args: []string{t.TempDir()}, Log: log},
	} {
		c.Worker, c.Kind = Kind+"-0", Kind
		if p, err := launcher.Launch(c); err == nil {
			if _, queued := p.(launch.Queued); queued {
				if e := p.Exit(); e.NotStarted == "" || e.Left != "" {
					t.Errorf("%s: exit %+v", name, e)
				}
				continue
			}
			p.Stop(0)
			t.Errorf("%s was started", name)
		}
	}
}
