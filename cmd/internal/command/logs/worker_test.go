package logs

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// lockedBuffer is written and read by two goroutines.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) until(t *testing.T, want string) {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		b.mu.Lock()
		got := b.text.String()
		b.mu.Unlock()
		if got == want {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("printed %q, want %q", got, want)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func appendTo(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
}

// Following continues in the next file when the log is rotated, and prints each line once.
func TestWorkerLogIsFollowedAcrossRotation(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "inference-0.log")
	appendTo(t, path+".1", "1\n2\n")
	appendTo(t, path, "3\n4\n")
	out := &lockedBuffer{}
	log := &workerLog{path: path, out: out}
	defer log.close()
	ended := make(chan struct{})
	done := make(chan error, 1)
	go func() { done <- log.follow(context.Background(), 3, ended) }()
	out.until(t, "2\n3\n4\n")
	appendTo(t, path, "5\n")
	out.until(t, "2\n3\n4\n5\n")
	appendTo(t, path, "6\n") // read after the rotation
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	appendTo(t, path, "7\n")
	out.until(t, "2\n3\n4\n5\n6\n7\n")
	appendTo(t, path, "8\n")
	close(ended)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	out.until(t, "2\n3\n4\n5\n6\n7\n8\n")
}

func TestNewestLines(t *testing.T) {
	t.Parallel()
	for lines, want := range map[int]string{0: "a\nb\nc\n", 1: "c\n", 2: "b\nc\n", 3: "a\nb\nc\n", 9: "a\nb\nc\n"} {
		if got := string(newest([]byte("a\nb\nc\n"), lines)); got != want {
			t.Errorf("%d lines: %q, want %q", lines, got, want)
		}
	}
	if got := newest(nil, 2); len(got) != 0 {
		t.Errorf("of an empty log: %q", got)
	}
}
