package segment

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Note is what the writer of a file said of the payloads before it, and the end of what it is about.
type Note struct {
	Text []byte
	Tail Tail
	Held map[uint64]Held // the payloads since the note before that are whole, by where they begin
}

// Held is a payload that lies in a file.
type Held struct {
	Length uint64
	CRC    uint32
}

// Notes reads what lies in the files of a run beyond known, which is what the ledger counts on, and gives the notes in it to see, file
// after file as they were begun. It stops in each at the first record that is not whole: there a crash tore it.
func Notes(dir string, known []Tail, see func(Note) error) error {
	counted := map[uint32]uint64{}
	for _, k := range known {
		counted[k.Segment] = k.Bytes
	}
	numbers, err := present(dir)
	if err != nil {
		return err
	}
	for _, number := range numbers {
		if err := notes(dir, number, max(counted[number], uint64(len(magic))), see); err != nil {
			return fmt.Errorf("read the notes of segment %d: %w", number, err)
		}
	}
	return nil
}

func notes(dir string, number uint32, begin uint64, see func(Note) error) error {
	f, err := os.Open(Path(dir, number))
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || uint64(info.Size()) <= begin {
		return err
	}
	head := make([]byte, len(magic))
	if _, err := f.ReadAt(head, 0); err != nil || string(head) != magic {
		return nil // torn where it began
	}
	rest := bufio.NewReaderSize(io.NewSectionReader(f, int64(begin), info.Size()-int64(begin)), 1<<20)
	held := map[uint64]Held{}
	records(rest, begin, uint64(info.Size()), func(offset uint64, payload []byte, note bool) bool {
		if !note {
			held[offset] = Held{Length: uint64(len(payload)), CRC: CRC(payload)}
			return true
		}
		err = see(Note{Text: payload, Tail: Tail{Segment: number, Bytes: offset + uint64(len(payload))}, Held: held})
		held = map[uint64]Held{}
		return err == nil
	})
	return err
}

// present lists the numbers of the files in a folder, ascending; of a folder that is not there none.
func present(dir string) (numbers []uint32, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list segments: %w", err)
	}
	for _, e := range entries {
		if n, ok := numberOf(e.Name()); ok {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers, nil
}

// numberOf is the number of the segment in a file of that name.
func numberOf(name string) (uint32, bool) {
	digits, ok := strings.CutSuffix(filepath.Base(name), ".seg")
	n, err := strconv.ParseUint(digits, 10, 32)
	return uint32(n), ok && err == nil
}
