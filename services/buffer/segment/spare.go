package segment

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/rollout-rl/rollout/libs/crashpoint"
)

// sparePrefix begins the names of files that wait to be lent again. No segment is called so, and what has such a name when the files are
// opened goes: nothing in it counts.
const sparePrefix = "spare-"

// spare is a file that was lent, whose payloads nobody needs any more. Its pages are in the page cache and its blocks on the disk, so to
// write over them costs a tenth of writing to a new file.
type spare struct {
	path string
	size uint64
}

// Spare keeps the file of a segment for Lend, or removes it, and says how large it was; one that is gone is no error. The ledger must have
// trimmed the segment, and whoever it was lent to must have closed it: it is not looked for. Consumers may still map it (Lend).
func (w *Writer) Spare(number uint32) (uint64, error) {
	path := Path(w.Dir, number)
	info, err := os.Stat(path)
	if w.SpareBytes == 0 || !w.local || err != nil || uint64(info.Size()) > w.SpareBytes {
		return Remove(w.Dir, number)
	}
	s := spare{path: filepath.Join(w.Dir, fmt.Sprintf("%s%06d", sparePrefix, number)), size: uint64(info.Size())}
	if err := os.Rename(path, s.path); err != nil {
		return 0, fmt.Errorf("keep segment %d: %w", number, err)
	}
	w.spares = append(w.spares, s)
	held := uint64(0)
	for _, s := range w.spares {
		held += s.size
	}
	for held > w.SpareBytes { // the oldest: a file that stays mapped is not kept for ever
		held -= w.spares[0].size
		err = errors.Join(err, w.discard(0))
	}
	return s.size, err
}

// Discard removes the files that are kept for Lend.
func (w *Writer) Discard() error {
	var errs []error
	for len(w.spares) > 0 {
		errs = append(errs, w.discard(0))
	}
	return errors.Join(errs...)
}

func (w *Writer) discard(i int) error {
	path := w.spares[i].path
	w.spares = append(w.spares[:i], w.spares[i+1:]...)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove a spare segment: %w", err)
	}
	return nil
}

// again begins the file of the next number in one that is kept; nil where there is none that nobody maps. What is in it stays until it is
// written over: a place in it is as good as its checksum, as in any file, and no row names one before its bytes were read back.
func (w *Writer) again() (*os.File, error) {
	for i := 0; i < len(w.spares); {
		f, err := os.OpenFile(w.spares[i].path, os.O_RDWR, 0)
		if err != nil { // who leads now has removed it
			if err := w.discard(i); err != nil {
				return nil, err
			}
			continue
		}
		if lock(f) {
			return w.rename(i, f)
		}
		if err := f.Close(); err != nil {
			return nil, fmt.Errorf("begin segment in a spare one: %w", err)
		}
		i++
	}
	return nil, nil
}

// rename gives a kept file, which is locked, the next number and unlocks it. Link and not rename, which would replace a file that somebody
// who led before has begun.
func (w *Writer) rename(i int, f *os.File) (*os.File, error) {
	number := w.last + 1
	err := os.Link(w.spares[i].path, Path(w.Dir, number))
	for errors.Is(err, os.ErrExist) {
		number++
		err = os.Link(w.spares[i].path, Path(w.Dir, number))
	}
	if errors.Is(err, os.ErrNotExist) { // who leads now has removed it
		return nil, errors.Join(w.discard(i), f.Close()) // nil: a new one is begun
	}
	if err == nil {
		w.last = number
		crashpoint.Here("buffer/linked") // a file that was kept has two names, of which no row names one
		err = w.discard(i)               // after a crash before this both names go when the files are opened
	}
	if err == nil && !w.Volatile {
		err = syncDir(w.Dir)
	}
	if err == nil {
		err = unlock(f)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("begin segment in a spare one: %w", err), f.Close())
	}
	return f, nil
}

// sweepSpares removes what is kept by nobody any more.
func sweepSpares(dir string) error {
	paths, err := filepath.Glob(filepath.Join(dir, sparePrefix+"*"))
	for _, path := range paths {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}
