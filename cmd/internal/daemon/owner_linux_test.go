package daemon

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/rollout-rl/rollout/libs/exit"
)

// as calls f with the file permissions of another user, which only root can take.
func as(t *testing.T, uid int, f func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can take the permissions of another user")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // without unlocking: the thread ends with the goroutine
		_, _, _ = syscall.RawSyscall(syscall.SYS_SETFSUID, uintptr(uid), 0, 0)
		f()
	}()
	<-done
}

func TestAnotherUsersStateFolderIsExplained(t *testing.T) {
	t.Parallel()
	chown := func(dir string) error {
		if os.Geteuid() != 0 {
			return nil // the test is skipped below
		}
		return errors.Join(os.Chown(dir, 54321, -1), os.Chown(infoFile(dir), 54321, -1))
	}
	parent, err := os.MkdirTemp("/tmp", "rollout-owner-") // t.TempDir is below a folder that only its owner may enter
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(parent) })
	state := filepath.Join(parent, "state")
	for _, err := range []error{os.Chmod(parent, 0o755), os.Mkdir(state, 0o700), os.WriteFile(infoFile(state), []byte("{}"), 0o600), chown(state)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	check := func(name string, err error) {
		t.Helper()
		e := exit.From(err)
		if e.Code != exit.NoPerm || !strings.Contains(e.Fix, "--state-dir") || !strings.Contains(err.Error(), "belongs to uid 54321") {
			t.Errorf("%s: exit code %d, %q, fix %q", name, e.Code, err, e.Fix)
		}
	}
	as(t, 65534, func() {
		_, err := Find(state)
		check("closed folder", err)
		_, _, err = Starter{StateDir: state, Binary: "/bin/true"}.Ensure(t.Context())
		check("start in it", err)
	})
	if err := os.Chmod(state, 0o755); err != nil { // readable, with a runtime file that is not
		t.Fatal(err)
	}
	as(t, 65534, func() {
		_, err := Find(state)
		check("open folder", err)
	})
	if err := os.Remove(infoFile(state)); err != nil {
		t.Fatal(err)
	}
	as(t, 65534, func() {
		_, _, err := Starter{StateDir: state, Binary: "/bin/true"}.Ensure(t.Context())
		check("start in an open folder", err)
		_, _, err = Starter{StateDir: filepath.Join(parent, "new"), Binary: "/bin/true"}.Ensure(t.Context())
		if e := exit.From(err); e.Code != exit.CannotMake || e.Fix == "" {
			t.Errorf("a folder that cannot be created: exit code %d, %v", e.Code, err)
		}
	})
}
