package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func openLog(t *testing.T, stateDir string) *os.File {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(stateDir, "logs"), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(LogFile(stateDir), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func content(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestLogIsRotated(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	f := openLog(t, dir)
	log, ok := BoundLog(f, dir).(*rotatingLog)
	if !ok {
		t.Fatal("the log of the daemon is not rotated")
	}
	log.most = 100
	for i := range 60 {
		if _, err := fmt.Fprintf(log, "line %03d..\n", i); err != nil { // 11 bytes, 9 to a file
			t.Fatal(err)
		}
	}
	fmt.Fprintln(f, "a crash") // as the runtime writes it
	path := LogFile(dir)
	for name, want := range map[string]string{path: "line 054", path + ".1": "line 045", path + ".2": "line 036", path + ".3": "line 027"} {
		if got := content(t, name); !strings.HasPrefix(got, want) || len(got) > 110 {
			t.Errorf("%s: %q", name, got)
		}
	}
	if got := content(t, path); !strings.HasSuffix(got, "line 059..\na crash\n") {
		t.Errorf("%q", got)
	}
	if there, _ := filepath.Glob(path + "*"); len(there) != 1+logKept {
		t.Errorf("there are %v", there)
	}
}

func TestOnlyTheLogFileIsRotated(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if got := BoundLog(os.Stderr, dir); got != os.Stderr {
		t.Error("of a folder without a log")
	}
	openLog(t, dir)
	if got := BoundLog(os.Stderr, dir); got != os.Stderr {
		t.Error("a terminal, or what a service manager reads")
	}
}

// The output of a daemon that fails is shown even if its log was rotated at the start.
func TestLongLogIsRotatedAtTheStart(t *testing.T) {
	t.Parallel()
	s := starter(t, "fail")
	f := openLog(t, s.StateDir)
	if err := f.Truncate(logMost + 1); err != nil {
		t.Fatal(err)
	}
	_, _, err := s.Ensure(t.Context())
	if err == nil || !strings.Contains(err.Error(), "  | ") {
		t.Errorf("got %v", err)
	}
	if info, err := os.Stat(LogFile(s.StateDir) + ".1"); err != nil || info.Size() != logMost+1 {
		t.Errorf("%v %v", info, err)
	}
	if got := content(t, LogFile(s.StateDir)); len(got) > 1000 || got == "" {
		t.Errorf("the log has %d bytes", len(got))
	}
}
