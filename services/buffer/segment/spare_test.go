package segment_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rollout-rl/rollout/services/buffer/segment"
)

func sparing(t *testing.T, dir string, most uint64) *segment.Writer {
	t.Helper()
	w, _, err := segment.Open(segment.Config{Dir: dir, RollBytes: roll, SpareBytes: most}, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// lend lends a segment and writes a record into it, as a producer does.
func lend(t *testing.T, w *segment.Writer, text string) (*segment.Lent, segment.Place) {
	t.Helper()
	l, err := w.Lend()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	f, err := os.OpenFile(segment.Path(w.Dir, l.Number()), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(segment.Bytes(text), int64(l.Begin())); err != nil {
		t.Fatal(err)
	}
	return l, segment.Place{Segment: l.Number(), Offset: l.Begin() + segment.HeaderBytes, Length: uint64(len(text))}
}

// part keeps a lent segment, as its trim does.
func part(t *testing.T, w *segment.Writer, l *segment.Lent) uint64 {
	t.Helper()
	freed, err := w.Spare(l.Number())
	if err := errors.Join(err, l.Close()); err != nil {
		t.Fatal(err)
	}
	return freed
}

func names(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return strings.Join(out, " ")
}

func TestFilesAreLentAgain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := sparing(t, dir, 1000)
	first, old := lend(t, w, "of the first life, and long")
	inode := first.Inode()
	if freed := part(t, w, first); freed != 8+8+old.Length {
		t.Errorf("freed %d", freed)
	}
	if err := read(dir, old, "of the first life, and long"); !errors.Is(err, segment.ErrDamaged) {
		t.Errorf("under its old number: %v", err)
	}
	again, err := w.Lend()
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if again.Inode() != inode || again.Number() != 2 || names(t, dir) != "000002.seg" {
		t.Fatalf("segment %d, inode %d for %d; %s", again.Number(), again.Inode(), inode, names(t, dir))
	}
	new := "of the second, and as long"
	if err := again.Check(segment.Place{Segment: 2, Offset: old.Offset, Length: uint64(len(new))}, segment.CRC([]byte(new))); !errors.Is(err, segment.ErrDamaged) {
		t.Errorf("what was not written is there: %v", err)
	}
	f, err := os.OpenFile(segment.Path(dir, 2), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(segment.Bytes(new), int64(again.Begin())); err != nil {
		t.Fatal(err)
	}
	place := segment.Place{Segment: 2, Offset: old.Offset, Length: uint64(len(new))}
	if err := errors.Join(again.Check(place, segment.CRC([]byte(new))), again.Sync(), read(dir, place, new)); err != nil {
		t.Error(err)
	}
	if report, err := segment.Scan(dir, 2, place.Offset+place.Length); err != nil || report.Flaw != "" {
		t.Errorf("%+v, %v", report, err)
	}
	if report, err := segment.Scan(dir, 2, place.Offset+place.Length+1); err != nil || report.Flaw == "" {
		t.Errorf("what is left of the first life passes for a record: %+v, %v", report, err)
	}
}

func TestAMappedFileIsLentToNobody(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := sparing(t, dir, 1000)
	first, place := lend(t, w, "held")
	reader := segment.NewReader(dir)
	if _, err := reader.Read(place, segment.CRC([]byte("held"))); err != nil {
		t.Fatal(err)
	}
	inode := first.Inode()
	part(t, w, first)
	second, _ := lend(t, w, "new")
	if second.Inode() == inode {
		t.Fatal("a file that is read was lent")
	}
	if got, err := reader.Read(place, segment.CRC([]byte("held"))); err != nil || string(got) != "held" {
		t.Errorf("%q, %v", got, err)
	}
	if err := reader.Close(); err != nil {
		t.Fatal(err)
	}
	if third, _ := lend(t, w, "newer"); third.Inode() != inode {
		t.Error("a file that nobody reads any more was not lent")
	}
}

// Who opened a file before it was taken must not share it as the one that it was.
func TestALateReaderIsRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := sparing(t, dir, 1000)
	first, _ := lend(t, w, "old")
	late, err := os.Open(segment.Path(dir, first.Number()))
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	part(t, w, first)
	lend(t, w, "new")
	if err := segment.Share(late); err == nil {
		t.Error("shared under a name that it has no more")
	}
}

func TestSparesAreBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := sparing(t, dir, 50)
	var all []*segment.Lent
	for range 4 {
		l, _ := lend(t, w, "1234") // 20 bytes
		all = append(all, l)
	}
	for _, l := range all {
		part(t, w, l)
	}
	if got := names(t, dir); got != "spare-000003 spare-000004" {
		t.Error(got)
	}
	large, _ := lend(t, w, strings.Repeat("x", 60))
	part(t, w, large)
	if got := names(t, dir); got != "spare-000004" {
		t.Error(got)
	}
	if err := w.Discard(); err != nil || names(t, dir) != "" {
		t.Error(err, names(t, dir))
	}
	none := sparing(t, dir, 0)
	l, _ := lend(t, none, "1234")
	part(t, none, l)
	if got := names(t, dir); got != "" {
		t.Error(got)
	}
}

// A crash between the new name and the old one's end, and one while files are kept: whoever opens the folder finds nothing that counts.
func TestSparesAfterACrash(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := sparing(t, dir, 1000)
	first, _ := lend(t, w, "old")
	part(t, w, first)
	if err := os.Link(filepath.Join(dir, "spare-000001"), segment.Path(dir, 2)); err != nil {
		t.Fatal(err)
	}
	next, repair, err := segment.Open(segment.Config{Dir: dir, RollBytes: roll, SpareBytes: 1000}, nil, 1)
	if err != nil || repair.Cut == 0 || names(t, dir) != "" {
		t.Fatalf("%+v, %v: %s", repair, err, names(t, dir))
	}
	if l, _ := lend(t, next, "new"); l.Number() != 3 {
		t.Errorf("segment %d is lent after 2 was begun", l.Number())
	}
	if l, _ := lend(t, w, "by who led before"); l.Number() != 2 { // its file is gone, and it replaces none
		t.Errorf("segment %d", l.Number())
	}
	if err := read(dir, segment.Place{Segment: 3, Offset: 16, Length: 3}, "new"); err != nil {
		t.Error(err)
	}
}

func TestASpareReplacesNoFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := sparing(t, dir, 1000)
	first, _ := lend(t, w, "old")
	part(t, w, first)
	if err := os.WriteFile(segment.Path(dir, 2), []byte("of another"), 0o600); err != nil {
		t.Fatal(err)
	}
	if l, _ := lend(t, w, "new"); l.Number() != 3 {
		t.Errorf("segment %d", l.Number())
	}
	if got, err := os.ReadFile(segment.Path(dir, 2)); err != nil || string(got) != "of another" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestALockLivesInTheMapping(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := sparing(t, dir, 1000)
	first, _ := lend(t, w, "held")
	f, err := os.Open(segment.Path(dir, first.Number()))
	if err != nil {
		t.Fatal(err)
	}
	if err := segment.Share(f); err != nil {
		t.Fatal(err)
	}
	copied, err := syscall.Dup(int(f.Fd())) // as Python's mmap keeps one
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	inode := first.Inode()
	part(t, w, first)
	if second, _ := lend(t, w, "new"); second.Inode() == inode {
		t.Error("lent while a copy of the handle is open")
	}
	if err := syscall.Close(copied); err != nil {
		t.Fatal(err)
	}
	if third, _ := lend(t, w, "new"); third.Inode() != inode {
		t.Error("not lent when it was closed")
	}
}
