package daemon

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
)

const (
	logMost = 16 << 20 // bytes of rolloutd.log, after which it is rotated
	logKept = 3        // rotated logs, rolloutd.log.1 (the newest) to rolloutd.log.3
)

// LogFile returns the log of the daemon.
func LogFile(stateDir string) string { return filepath.Join(stateDir, "logs", "rolloutd.log") }

// BoundLog rotates the log of a state folder if out is that file; any other out is returned
// unchanged. The writer is safe for concurrent use.
func BoundLog(out io.Writer, stateDir string) io.Writer {
	file, ok := out.(*os.File)
	if !ok {
		return out
	}
	own, err := file.Stat()
	if err != nil {
		return out
	}
	if log, err := os.Stat(LogFile(stateDir)); err != nil || !os.SameFile(own, log) {
		return out
	}
	return &rotatingLog{file: file, path: LogFile(stateDir), size: own.Size(), most: logMost}
}

type rotatingLog struct {
	mu         sync.Mutex
	file       *os.File
	path       string
	size, most int64
}

func (b *rotatingLog) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.size+int64(len(p)) > b.most {
		b.size = 0 // also if it fails: the next attempt is after another logMost bytes
		if err := rotate(b.file, b.path); err != nil {
			fmt.Fprintln(b.file, "rolloutd: the log could not be rotated:", err)
		}
	}
	n, err := b.file.Write(p)
	b.size += int64(n)
	return n, err
}

// rotate renames path.1 to path.2 and so on, copies the log to path.1, and truncates it. The log
// stays the same file, because the Go runtime writes a crash to it. If rotate fails, nothing of the
// log is lost.
func rotate(log *os.File, path string) error {
	older := func(n int) string { return fmt.Sprintf("%s.%d", path, n) }
	copied := path + ".new"
	if err := copyFile(path, copied); err != nil {
		return errors.Join(err, os.Remove(copied))
	}
	for n := logKept - 1; n > 0; n-- {
		if err := os.Rename(older(n), older(n+1)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := os.Rename(copied, older(1)); err != nil {
		return err
	}
	if err := log.Truncate(0); err != nil {
		return err
	}
	_, err := log.Seek(0, io.SeekStart) // for writers that have not opened it to append
	return err
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
