package local

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rollout-rl/rollout/libs/disk/disktest"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// written passes output through a log, and returns the log and what its files contain, the older
// one first.
func written(t *testing.T, path string, limits LogLimits, output io.Reader) (*workerLog, string) {
	t.Helper()
	l, err := openLog(path, limits)
	if err != nil {
		t.Fatal(err)
	}
	l.copyFrom(output)
	older, _ := os.ReadFile(path + ".1")
	newer, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return l, string(older) + string(newer)
}

// A reward that prints the same line for each sample uses little of the disk. The traceback after
// it is complete.
func TestFloodIsDroppedAndTheEndSurvives(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var output strings.Builder
		for n := range 100_000 {
			fmt.Fprintf(&output, "score of sample %d is 0.%d\n", n, n%7)
		}
		output.WriteString("Traceback (most recent call last):\n  File \"reward.py\", line 3\nValueError: no number")
		l, text := written(t, filepath.Join(t.TempDir(), "worker.log"), LogLimits{}, strings.NewReader(output.String()))
		if len(text) > 20<<10 || !strings.Contains(text, "rollout: dropped 99950 lines: more than 500 a second, or more than 50 that differ only in digits\n") {
			t.Errorf("%d bytes: %.3000s", len(text), text)
		}
		end := "Traceback (most recent call last):\n  File \"reward.py\", line 3\nValueError: no number\n"
		if !strings.Contains(text, end) {
			t.Errorf("ends with %q", text[max(0, len(text)-300):])
		}
		if last := l.lastLines(); len(last) != launch.LastLines || last[len(last)-1] != "ValueError: no number" {
			t.Errorf("last lines %q", last)
		}
	})
}

// Different lines beyond the rate are dropped too; those at the end are written when the process
// exits.
func TestLastLinesAreWrittenBeyondTheRate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var output strings.Builder
		for n := range 5000 {
			fmt.Fprintf(&output, "%s\n", strings.Repeat(string(rune('a'+n%26)), 1+n/26))
		}
		_, text := written(t, filepath.Join(t.TempDir(), "worker.log"), LogLimits{LinesPerSecond: 100}, strings.NewReader(output.String()))
		lines := strings.Split(strings.TrimSpace(text), "\n")
		if want := 100 + 1 + 1 + tailLines; len(lines) != want {
			t.Errorf("%d lines, want %d", len(lines), want)
		}
		if !strings.HasSuffix(output.String(), lines[len(lines)-1]+"\n") {
			t.Errorf("ends with %q", lines[len(lines)-1])
		}
	})
}

// At a moderate rate every line is written.
func TestModerateRate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, w := io.Pipe()
		go func() {
			for n := range 200 {
				fmt.Fprintf(w, "step %d\n", n)
				time.Sleep(50 * time.Millisecond)
			}
			w.Close()
		}()
		_, text := written(t, filepath.Join(t.TempDir(), "worker.log"), LogLimits{}, r)
		if strings.Count(text, "step ") != 200 || strings.Contains(text, "dropped") {
			t.Errorf("%.500s", text)
		}
	})
}

// Both files together stay below twice the limit and have the newest lines. A log that an earlier
// process has left counts.
func TestLogOfAWorkerIsRotated(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "worker.log")
	if err := os.WriteFile(path, []byte(strings.Repeat("of an earlier process\n", 30)), 0o600); err != nil {
		t.Fatal(err)
	}
	var output strings.Builder
	for n := range 100 {
		fmt.Fprintf(&output, "line %03d of a worker\n", n)
	}
	_, text := written(t, path, LogLimits{Bytes: 1000, LinesPerSecond: 10_000}, strings.NewReader(output.String()))
	if len(text) > 2000 || !strings.HasSuffix(text, output.String()[len(output.String())-1000:]) {
		t.Errorf("%d bytes, end with %q", len(text), text[max(0, len(text)-100):])
	}
	if found, _ := filepath.Glob(path + "*"); len(found) != 2 {
		t.Errorf("files %v", found)
	}
}

// A line without an end, as of a program that prints bytes, uses bounded memory.
func TestLongLineIsCut(t *testing.T) {
	t.Parallel()
	output := strings.NewReader(strings.Repeat("x", 10<<20) + "\nafter\n")
	_, text := written(t, filepath.Join(t.TempDir(), "worker.log"), LogLimits{}, output)
	if len(text) > longestLine+200 || !strings.HasSuffix(text, "(rollout: the line is longer than 64 KiB)\nafter\n") {
		t.Errorf("%d bytes, end with %q", len(text), text[max(0, len(text)-100):])
	}
}

// A full disk does not stop a worker that prints; its lines are counted, and the last ones are
// written if there is space again.
func TestWorkerPrintsOnAFullDisk(t *testing.T) {
	t.Parallel()
	small := disktest.Mount(t, "1m")
	path := filepath.Join(small.Dir, "worker.log")
	r, w := io.Pipe()
	go func() {
		fmt.Fprintln(w, "before")
		for text := []byte(nil); len(text) == 0; text, _ = os.ReadFile(path) {
			<-time.After(time.Millisecond) // until the line is in the file
		}
		small.Fill(0)
		for n := range 5000 {
			fmt.Fprintln(w, n, strings.Repeat("y", n%400))
		}
		small.Free()
		fmt.Fprintln(w, "after")
		w.Close()
	}()
	_, text := written(t, path, LogLimits{LinesPerSecond: 10_000}, r)
	if !strings.HasPrefix(text, "before\n") || !strings.Contains(text, "rollout: dropped ") || !strings.Contains(text, "\n4999 ") || !strings.Contains(text, "after\n") {
		t.Errorf("%.2000s", text)
	}
}
