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
	logMost = 16 << 20 // bytes of rolloutd.log; a longer one begins anew
	logKept = 3        // of those before, as rolloutd.log.1 (the newest) to rolloutd.log.3
)

// LogFile is where the daemon writes what it does.
func LogFile(stateDir string) string { return filepath.Join(stateDir, "logs", "rolloutd.log") }

// BoundLog keeps the log file of a state folder from growing for ever, where out is that file; another out comes back as it is.
// Any number of goroutines may write.
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
	return &bound{file: file, path: LogFile(stateDir), size: own.Size(), most: logMost}
}

type bound struct {
	mu         sync.Mutex
	file       *os.File
	path       string
	size, most int64
}

func (b *bound) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.size+int64(len(p)) > b.most {
		b.size = 0 // of a file that could not be put away too: the next try comes after as much again
		if err := putAway(b.file, b.path); err != nil {
			fmt.Fprintln(b.file, "rolloutd: the log could not be put away:", err)
		}
	}
	n, err := b.file.Write(p)
	b.size += int64(n)
	return n, err
}

// putAway copies the log to path.1, which was path.2 before, and so on, and empties it. The file stays the same one: a crash of the
// process is written to it by the runtime. Where it fails nothing of the log is lost.
func putAway(log *os.File, path string) error {
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
	_, err := log.Seek(0, io.SeekStart) // of whoever has not opened it to append
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
