package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/exit"
)

// TestMain runs this binary as rolloutd if the environment says so.
func TestMain(m *testing.M) {
	switch os.Getenv("FAKE_ROLLOUTD") {
	case "":
		os.Exit(m.Run())
	case "fail":
		fmt.Println("line one")
		fmt.Fprintln(os.Stderr, "no room on the disk")
		os.Exit(3)
	case "silent":
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, syscall.SIGTERM)
		select {
		case <-stop:
		case <-time.After(time.Minute): // it would never be stopped
		}
	case "serve":
		serve()
	}
}

// serve is a daemon: it writes its file and waits for the signal.
func serve() {
	stop := make(chan os.Signal, 2)
	signal.Notify(stop, syscall.SIGTERM)
	stateDir := os.Args[2]
	// two starts at the same time would both add a line
	marker, err := os.OpenFile(filepath.Join(stateDir, fmt.Sprintf("started-%d", os.Getpid())), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		err = marker.Close()
	}
	unlock, lockErr := own(stateDir)
	if lockErr == nil {
		defer unlock.Close()
	}
	err = errors.Join(err, lockErr)
	data, _ := json.Marshal(Info{PID: os.Getpid(), GRPC: "127.0.0.1:1", TokenFile: "token", Targets: []string{"all"}})
	err = errors.Join(err, os.WriteFile(infoFile(stateDir)+".tmp", data, 0o600), os.Rename(infoFile(stateDir)+".tmp", infoFile(stateDir)))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	<-stop
	if os.Getenv("FAKE_STUBBORN") != "" {
		<-stop
	}
}

// own locks a state folder as rolloutd does.
func own(stateDir string) (*os.File, error) {
	f, err := os.OpenFile(lockOf(stateDir), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	return f, syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
}

func starter(t *testing.T, mode string, env ...string) Starter {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := Starter{StateDir: t.TempDir(), Binary: self, Env: append(append(os.Environ(), "FAKE_ROLLOUTD="+mode), env...)}
	t.Cleanup(func() {
		if info, _ := Find(s.StateDir); info != nil {
			_ = syscall.Kill(info.PID, syscall.SIGKILL)
		}
	})
	return s
}

func TestStartsReusesAndStops(t *testing.T) {
	t.Parallel()
	s := starter(t, "serve")
	info, started, err := s.Ensure(t.Context())
	if err != nil || !started || !alive(info.PID) {
		t.Fatalf("%v %t %v", info, started, err)
	}
	if sid := sessionOf(t, info.PID); sid != info.PID {
		t.Errorf("it is in session %d: a hang-up of the terminal would end it", sid)
	}
	again, started, err := s.Ensure(t.Context())
	if err != nil || started || again.PID != info.PID {
		t.Errorf("%v %t %v", again, started, err)
	}
	stopped, err := Stop(t.Context(), s.StateDir, time.Minute, false)
	if err != nil || stopped.PID != info.PID || alive(info.PID) {
		t.Errorf("%v %v", stopped, err)
	}
	if found, err := Find(s.StateDir); found != nil || err != nil {
		t.Errorf("a dead daemon is found: %v %v", found, err)
	}
	if stopped, err := Stop(t.Context(), s.StateDir, time.Second, false); stopped != nil || err != nil {
		t.Errorf("%v %v", stopped, err)
	}
	if info, started, err := s.Ensure(t.Context()); err != nil || !started || info.PID == again.PID {
		t.Errorf("the stale file was believed: %v %t %v", info, started, err)
	}
}

func sessionOf(t *testing.T, pid int) int {
	t.Helper()
	sid, _, errno := syscall.RawSyscall(syscall.SYS_GETSID, uintptr(pid), 0, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	return int(sid)
}

func TestOneOfManyStartersStarts(t *testing.T) {
	t.Parallel()
	s := starter(t, "serve")
	var group sync.WaitGroup
	pids := make([]int, 6)
	starts := make([]bool, len(pids))
	for i := range pids {
		group.Go(func() {
			info, started, err := s.Ensure(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			pids[i], starts[i] = info.PID, started
		})
	}
	group.Wait()
	markers, err := filepath.Glob(filepath.Join(s.StateDir, "started-*"))
	if err != nil || len(markers) != 1 {
		t.Errorf("%d daemons were started", len(markers))
	}
	count := 0
	for i := range pids {
		if pids[i] != pids[0] {
			t.Errorf("pids %v", pids)
		}
		if starts[i] {
			count++
		}
	}
	if count != 1 {
		t.Errorf("%d say that they started it", count)
	}
}

func TestADaemonThatFailsToStartIsExplained(t *testing.T) {
	t.Parallel()
	s := starter(t, "fail")
	if err := os.MkdirAll(filepath.Dir(LogFile(s.StateDir)), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(LogFile(s.StateDir), []byte("of an older daemon\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, err := s.Ensure(t.Context())
	var e *exit.Error
	if !errors.As(err, &e) || e.Code != exit.Unavailable {
		t.Fatalf("got %v", err)
	}
	if text := err.Error(); text != "rolloutd did not start: exit status 3\n  | line one\n  | no room on the disk" {
		t.Errorf("got %q", text)
	}
	if !strings.Contains(e.Fix, LogFile(s.StateDir)) {
		t.Errorf("fix %q", e.Fix)
	}
}

func TestStartTimesOut(t *testing.T) {
	t.Parallel()
	s := starter(t, "silent")
	s.Timeout = 200 * time.Millisecond
	if _, _, err := s.Ensure(t.Context()); err == nil || !strings.Contains(err.Error(), "did not serve within 200ms") {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := s.Ensure(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestDaemonThatIgnoresSignalsIsKilled(t *testing.T) {
	t.Parallel()
	s := starter(t, "serve", "FAKE_STUBBORN=1")
	info, _, err := s.Ensure(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Stop(t.Context(), s.StateDir, 200*time.Millisecond, false); err == nil || !strings.Contains(err.Error(), "still draining") {
		t.Errorf("got %v", err)
	}
	if _, err := Stop(t.Context(), s.StateDir, time.Minute, true); err != nil || alive(info.PID) {
		t.Errorf("got %v", err)
	}
}

// A stopped process receives signals of one kind as one.
func TestAFrozenDaemonIsKilled(t *testing.T) {
	t.Parallel()
	s := starter(t, "serve", "FAKE_STUBBORN=1")
	info, _, err := s.Ensure(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(info.PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for state := ""; !strings.Contains(state, ") T "); {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", info.PID))
		if err != nil {
			t.Fatal(err)
		}
		state = string(stat)
	}
	var silent *exit.Error
	if err := info.Silent(s.StateDir, exit.New(exit.Unavailable, "", "no answer")); !errors.As(err, &silent) || silent.Reason != "DAEMON_STOPPED" || !strings.Contains(silent.Fix, "kill -CONT") {
		t.Errorf("why it does not answer: %v", err)
	}
	stopped := make(chan error, 1)
	go func() {
		_, err := Stop(t.Context(), s.StateDir, time.Minute, true)
		stopped <- err
	}()
	<-time.After(30 * poll) // several were sent
	if err := syscall.Kill(info.PID, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := <-stopped; err != nil || alive(info.PID) {
		t.Errorf("got %v", err)
	}
}

func TestStaleAndBrokenFiles(t *testing.T) {
	t.Parallel()
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"dead":  fmt.Sprintf(`{"pid": %d, "grpc": "127.0.0.1:1"}`, dead.Process.Pid),
		"half":  `{"pid": 1`,
		"empty": "", "no pid": `{"grpc": "127.0.0.1:1"}`,
	} {
		dir := t.TempDir()
		if err := os.WriteFile(infoFile(dir), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if info, err := Find(dir); info != nil || err != nil {
			t.Errorf("%s: %v %v", name, info, err)
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(infoFile(dir), fmt.Appendf(nil, `{"pid": %d, "grpc": "127.0.0.1:1"}`, os.Getpid()), 0o600); err != nil {
		t.Fatal(err)
	}
	// another process has the PID of the one that wrote the file: after a reboot, or in a copy of the
	// folder
	if info, err := Find(dir); info != nil || err != nil {
		t.Errorf("a folder that was never owned: %v %v", info, err)
	}
	lock, err := own(dir)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := Find(dir); err != nil || info == nil || info.GRPC != "127.0.0.1:1" {
		t.Errorf("%v %v", info, err)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	if info, err := Stop(t.Context(), dir, time.Minute, false); info != nil || err != nil { // would end this process
		t.Errorf("a folder that is not locked: %v %v", info, err)
	}
}

func TestAFileInPlaceOfTheFolder(t *testing.T) {
	t.Parallel()
	s := starter(t, "serve")
	s.StateDir = filepath.Join(s.StateDir, "file")
	if err := os.WriteFile(s.StateDir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, err := s.Ensure(t.Context())
	if e := exit.From(err); e.Code != exit.CannotMake || e.Fix == "" {
		t.Errorf("exit code %d: %v", e.Code, err)
	}
}

func TestStateDir(t *testing.T) {
	t.Parallel()
	configured := t.TempDir()
	if err := os.MkdirAll(filepath.Join(configured, "rollout"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(configured, "rollout", "rolloutd.toml"), []byte("state_dir = \"/e\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		flag string
		env  []string
		want string
	}{
		{"/a", []string{"ROLLOUT_STATE_DIR=/b"}, "/a"},
		{"", []string{"ROLLOUT_STATE_DIR=/b", "XDG_STATE_HOME=/c", "XDG_CONFIG_HOME=" + configured}, "/b"},
		{"", []string{"XDG_STATE_HOME=/c", "HOME=/d", "XDG_CONFIG_HOME=" + configured}, "/e"},
		{"", []string{"XDG_STATE_HOME=/c", "HOME=/d"}, "/c/rollout"},
		{"", []string{"XDG_STATE_HOME=relative", "HOME=/d"}, "/d/.local/state/rollout"},
	} {
		if got, err := StateDir(c.flag, c.env); err != nil || got != c.want {
			t.Errorf("%v: %q %v", c, got, err)
		}
	}
	if _, err := StateDir("", nil); err == nil {
		t.Error("a folder out of nothing")
	}
}

func TestTheConfigurationOfTheLastStartIsRemembered(t *testing.T) {
	t.Parallel()
	state := filepath.Join(t.TempDir(), "state")
	remembered := func(want ...string) {
		t.Helper()
		if got, err := Remembered(state); err != nil || !slices.Equal(got, want) {
			t.Errorf("remembered %q, %v, not %q", got, err, want)
		}
	}
	remembered()
	if err := Remember(state, []string{"--config", "/etc/my rollout.toml"}); err != nil {
		t.Fatal(err)
	}
	remembered("--config", "/etc/my rollout.toml")
	if err := Remember(state, nil); err != nil {
		t.Fatal(err)
	}
	remembered()
}
