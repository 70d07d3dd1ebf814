package input

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Reading a pipe without a writer would block.
func TestDigestOfAPipeIsRefused(t *testing.T) {
	t.Parallel()
	name := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(name, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := DigestFile(name); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("got %v", err)
	}
}
