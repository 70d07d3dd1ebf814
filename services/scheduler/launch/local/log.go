package local

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// LogLimits bound the log of a worker. A zero field takes its default.
type LogLimits struct {
	// Bytes is the size at which a log is rotated: PATH becomes PATH.1, which replaces the one before.
	// A worker has two files at most. 0: 16 MiB.
	Bytes int64
	// LinesPerSecond is how many lines of a second are written; a tenth of it, but at least 10, if
	// they differ only in digits. Others are dropped and counted. 0: 500.
	LinesPerSecond int
}

const (
	longestLine = 64 << 10  // bytes; the rest of a longer line is dropped
	tailLines   = 200       // the last lines of a process are written, also if the rate was exceeded
	tailBytes   = 256 << 10 // of these lines
	logWindow   = time.Second
)

func (l LogLimits) withDefaults() LogLimits {
	l.Bytes, l.LinesPerSecond = cmp.Or(l.Bytes, 16<<20), cmp.Or(l.LinesPerSecond, 500)
	return l
}

func (l LogLimits) alike() int { return max(10, l.LinesPerSecond/10) }

// line is a line of the output of a process, without its end.
type line struct {
	text    []byte
	dropped bool
}

// workerLog writes the output of one process to a file of bounded size and rate. A full disk, or a
// file that was removed, never stops the process: its lines are dropped and counted. Safe for
// concurrent use.
type workerLog struct {
	limits LogLimits
	path   string
	now    func() time.Time

	mu      sync.Mutex
	file    *os.File
	size    int64
	tail    []line // newest last
	bytes   int    // of the tail
	since   time.Time
	lines   int            // written in this window
	alike   map[string]int // written in this window, by what is left of a line without digits
	dropped int            // since the last report
}

func openLog(path string, limits LogLimits) (*workerLog, error) {
	l := &workerLog{limits: limits.withDefaults(), path: path, now: time.Now, alike: map[string]int{}}
	if err := l.open(); err != nil {
		return nil, fmt.Errorf("open the worker's log: %w", err)
	}
	return l, nil
}

func (l *workerLog) open() error {
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	l.file, l.size = file, 0
	if info, err := file.Stat(); err == nil {
		l.size = info.Size()
	}
	return nil
}

// copyFrom writes the lines of r until its end.
func (l *workerLog) copyFrom(r io.Reader) {
	ended := make(chan struct{})
	var reports sync.WaitGroup
	reports.Go(func() { l.reportEvery(ended) })
	var rest []byte
	cut := false // the line in rest is longer than longestLine
	chunk := make([]byte, 32<<10)
	for {
		n, err := r.Read(chunk)
		for data := chunk[:n]; len(data) > 0; {
			piece, after, complete := bytes.Cut(data, []byte{'\n'})
			data = after
			if room := longestLine - len(rest); len(piece) > room {
				piece, cut = piece[:room], true
			}
			rest = append(rest, piece...)
			if !complete {
				break
			}
			l.add(rest, cut)
			rest, cut = rest[:0], false
		}
		if err != nil {
			break
		}
	}
	if len(rest) > 0 {
		l.add(rest, cut)
	}
	close(ended)
	reports.Wait()
	l.finish()
}

// reportEvery reports dropped lines at the end of each window, also if no line follows.
func (l *workerLog) reportEvery(ended <-chan struct{}) {
	ticker := time.NewTicker(logWindow)
	defer ticker.Stop()
	for {
		select {
		case <-ended:
			return
		case <-ticker.C:
			l.mu.Lock()
			l.turn(l.now())
			l.mu.Unlock()
		}
	}
}

// add writes a line, or drops it if there are too many.
func (l *workerLog) add(text []byte, cut bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.turn(l.now())
	entry := line{text: bytes.Clone(text)}
	if cut {
		entry.text = append(entry.text, " ... (rollout: the line is longer than 64 KiB)"...)
	}
	kind := kindOf(text)
	if l.lines >= l.limits.LinesPerSecond || l.alike[kind] >= l.limits.alike() {
		entry.dropped = true
	} else {
		l.lines++
		l.alike[kind]++
		entry.dropped = !l.write(entry.text)
	}
	if entry.dropped {
		l.dropped++
	}
	l.remember(entry)
}

// turn begins a new window if the current one has ended, and reports the lines dropped in it.
func (l *workerLog) turn(now time.Time) {
	if now.Sub(l.since) < logWindow {
		return
	}
	l.report()
	l.since, l.lines = now, 0
	clear(l.alike)
}

func (l *workerLog) report() {
	if l.dropped > 0 && l.write(fmt.Appendf(nil, "rollout: dropped %d lines: more than %d a second, or more than %d that differ only in digits",
		l.dropped, l.limits.LinesPerSecond, l.limits.alike())) {
		l.dropped = 0
	}
}

// finish writes the last lines that were dropped, such as a traceback after a flood, and closes the
// file.
func (l *workerLog) finish() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.report()
	first := true
	for _, entry := range l.tail {
		if !entry.dropped {
			continue
		}
		if first {
			l.write([]byte("rollout: those of the last lines of the process that were dropped:"))
			first = false
		}
		l.write(entry.text)
	}
	if l.file != nil {
		_ = l.file.Close()
	}
}

// remember keeps a line for finish and lastLines.
func (l *workerLog) remember(entry line) {
	l.tail, l.bytes = append(l.tail, entry), l.bytes+len(entry.text)
	for len(l.tail) > tailLines || l.bytes > tailBytes && len(l.tail) > launch.LastLines {
		l.bytes -= len(l.tail[0].text)
		l.tail = l.tail[1:]
	}
}

// lastLines is the last lines of the process, whether they were written or not.
func (l *workerLog) lastLines() (lines []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, entry := range l.tail[max(0, len(l.tail)-launch.LastLines):] {
		lines = append(lines, strings.ToValidUTF8(string(entry.text), "?"))
	}
	return lines
}

// write appends a line to the file, and reports whether it did.
func (l *workerLog) write(text []byte) bool {
	if l.size > 0 && l.size+int64(len(text))+1 > l.limits.Bytes {
		l.rotate()
	}
	if l.file == nil && l.open() != nil {
		return false
	}
	n, err := l.file.Write(append(text[:len(text):len(text)], '\n'))
	l.size += int64(n)
	if err != nil && n > 0 { // of a line that was cut, as on a full disk, nothing stays
		if l.file.Truncate(l.size-int64(n)) == nil {
			l.size -= int64(n)
		}
	}
	return err == nil
}

// rotate makes the file the older one. If it can't be renamed, it is truncated: the size is bounded
// in any case.
func (l *workerLog) rotate() {
	if err := os.Rename(l.path, l.path+".1"); err != nil && !errors.Is(err, os.ErrNotExist) {
		_ = l.file.Truncate(0)
		l.size = 0
		return
	}
	_ = l.file.Close()
	l.file, l.size = nil, 0
}

// kindOf is a line without its digits. Lines of one kind are repetitions, such as the log of a
// reward with its score.
func kindOf(text []byte) string {
	const most = 200 // bytes that are compared
	kept := make([]byte, 0, min(len(text), most))
	for _, c := range text {
		if len(kept) == most {
			break
		}
		if c < '0' || c > '9' {
			kept = append(kept, c)
		}
	}
	return string(kept)
}
