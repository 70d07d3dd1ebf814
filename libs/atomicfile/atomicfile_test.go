package atomicfile_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/rollout-rl/rollout/libs/atomicfile"
)

func TestAFileIsReplacedWhole(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	path := filepath.Join(folder, "keys.json")
	for _, text := range []string{"a longer one", "short"} {
		if err := atomicfile.Write(path, []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("got %q, %v", got, err)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o640 {
		t.Errorf("got %v, %v", info.Mode(), err)
	}
	alone(t, folder, "keys.json")
}

func TestAFailureLeavesNothing(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	if err := os.MkdirAll(filepath.Join(folder, "taken", "by"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := atomicfile.Write(filepath.Join(folder, "taken"), nil, 0o600); err == nil {
		t.Error("a folder was replaced")
	}
	alone(t, folder, "taken")
	if err := atomicfile.Write(filepath.Join(folder, "gone", "file"), nil, 0o600); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func alone(t *testing.T, folder, name string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil || len(entries) != 1 || entries[0].Name() != name {
		t.Errorf("got %v, %v", entries, err)
	}
}
