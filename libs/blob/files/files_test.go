package files_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/blobtest"
	"github.com/rollout-rl/rollout/libs/blob/files"
)

func open(t *testing.T) *files.Store {
	t.Helper()
	s, err := files.Open(filepath.Join(t.TempDir(), "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSuite(t *testing.T) {
	t.Parallel()
	blobtest.Run(t, func(t *testing.T) blob.Store { return open(t) })
}

func TestPutFileDoesNotCopy(t *testing.T) {
	t.Parallel()
	s := open(t)
	source := filepath.Join(s.Spool(), "big")
	if err := os.WriteFile(source, []byte("tensor"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PutFile(t.Context(), "w/1", source); err != nil {
		t.Fatal(err)
	}
	path, err := s.Path("w/1")
	if err != nil {
		t.Fatal(err)
	}
	a, errA := os.Stat(source)
	b, errB := os.Stat(path)
	if errA != nil || errB != nil || !os.SameFile(a, b) {
		t.Fatalf("the file was copied (%v %v)", errA, errB)
	}
}

func TestOpenRemovesWhatACrashLeft(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	s, err := files.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Put(t.Context(), "kept", strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	half := filepath.Join(s.Spool(), "put-1")
	if err := os.WriteFile(half, []byte("ha"), 0o600); err != nil {
		t.Fatal(err)
	}
	fresh := filepath.Join(s.Spool(), "put-2")
	if err := os.WriteFile(fresh, []byte("another process's"), 0o600); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-2 * time.Hour)
	if err := os.Chtimes(half, old, old); err != nil {
		t.Fatal(err)
	}
	if s, err = files.Open(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(half); !os.IsNotExist(err) {
		t.Errorf("half-written file: %v", err)
	}
	if _, err := os.Stat(fresh); err != nil {
		t.Errorf("a file in work: %v", err)
	}
	if _, err := s.Stat(t.Context(), "kept"); err != nil {
		t.Error(err)
	}
}
