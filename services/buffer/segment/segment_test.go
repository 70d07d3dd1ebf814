package segment_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/rollout-rl/rollout/services/buffer/segment"
)

const roll = 200

func open(t *testing.T, dir string, tail segment.Tail) (*segment.Writer, segment.Repair) {
	t.Helper()
	var known []segment.Tail
	for n := uint32(1); n < tail.Segment; n++ {
		known = append(known, segment.Tail{Segment: n})
	}
	if tail.Segment > 0 {
		known = append(known, tail)
	}
	w, repair, err := segment.Open(segment.Config{Dir: dir, RollBytes: roll}, known, tail.Segment)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	return w, repair
}

func records(texts ...string) (out []segment.Record) {
	for _, s := range texts {
		out = append(out, segment.Record{Payload: []byte(s), CRC: segment.CRC([]byte(s))})
	}
	return out
}

func write(t *testing.T, w *segment.Writer, texts ...string) []segment.Place {
	t.Helper()
	places, err := w.Append(records(texts...))
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Sync(); err != nil {
		t.Fatal(err)
	}
	return places
}

func read(dir string, p segment.Place, text string) error {
	r := segment.NewReader(dir)
	got, err := r.Read(p, segment.CRC([]byte(text)))
	if err == nil && string(got) != text {
		err = fmt.Errorf("read %q, want %q", got, text)
	}
	return errors.Join(err, r.Close())
}

func TestFormat(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w, _ := open(t, dir, segment.Tail{})
	if w.Tail() != (segment.Tail{}) {
		t.Fatalf("tail of nothing: %+v", w.Tail())
	}
	places := write(t, w, "123456789", "")
	want := []byte("RSEG0001\x09\x00\x00\x00\x83\x92\x06\xe3123456789\x00\x00\x00\x00\x00\x00\x00\x00") // e3069283 is the check value of CRC-32C
	got, err := os.ReadFile(segment.Path(dir, 1))
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%q %v", got, err)
	}
	if places[0] != (segment.Place{Segment: 1, Offset: 16, Length: 9}) || w.Tail() != (segment.Tail{Segment: 1, Bytes: 33}) {
		t.Errorf("%+v %+v", places, w.Tail())
	}
}

func TestRollAndReopen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w, _ := open(t, dir, segment.Tail{})
	var places []segment.Place
	text := func(i int) string { return fmt.Sprintf("payload %d %s", i, bytes.Repeat([]byte{'x'}, i)) }
	for i := range 20 {
		places = append(places, write(t, w, text(i))...)
		if i%3 == 0 {
			w, _ = open(t, dir, w.Tail())
		}
	}
	if last := places[19].Segment; last < 3 {
		t.Errorf("20 payloads in %d segments: it does not roll", last)
	}
	for i, p := range places {
		if err := read(dir, p, text(i)); err != nil {
			t.Error(err)
		}
	}
}

// The last writer may still have the file open: bytes after the durable end stay, and nothing is
// written there again.
func TestATornTailIsLeftAlone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w, _ := open(t, dir, segment.Tail{})
	kept := write(t, w, "kept")
	tail := w.Tail()
	write(t, w, "torn", string(make([]byte, roll)))
	write(t, w, "in a newer file") // and that file is unknown to the ledger
	w, repair := open(t, dir, tail)
	if repair.Cut == 0 || repair.Short != nil {
		t.Errorf("%+v", repair)
	}
	if _, err := os.Stat(segment.Path(dir, 2)); !os.IsNotExist(err) {
		t.Errorf("the newer file is there: %v", err)
	}
	after := write(t, w, "after")
	if after[0].Segment == kept[0].Segment {
		t.Errorf("%+v is in the file of %+v", after, kept)
	}
	if err := errors.Join(read(dir, kept[0], "kept"), read(dir, after[0], "after")); err != nil {
		t.Error(err)
	}
}

func TestDamageIsFound(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(t *testing.T, path string, p segment.Place){
		"bit of the payload": flip(0),
		"bit of the length":  flip(-segment.HeaderBytes),
		"bit of the crc":     flip(-4),
		"bit of the magic":   func(t *testing.T, path string, _ segment.Place) { flip(0)(t, path, segment.Place{}) },
		"truncated":          func(t *testing.T, path string, p segment.Place) { truncate(t, path, int64(p.Offset+p.Length-1)) },
		"emptied":            func(t *testing.T, path string, _ segment.Place) { truncate(t, path, 0) },
		"gone": func(t *testing.T, path string, _ segment.Place) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			w, _ := open(t, dir, segment.Tail{})
			p := write(t, w, "first", "second")[1]
			if err := read(dir, p, "second"); err != nil {
				t.Fatal(err)
			}
			damage(t, segment.Path(dir, 1), p)
			if err := read(dir, p, "second"); !errors.Is(err, segment.ErrDamaged) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestShortFileIsNotWrittenToAgain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w, _ := open(t, dir, segment.Tail{})
	write(t, w, "lost")
	tail := w.Tail()
	truncate(t, segment.Path(dir, 1), 10)
	w, repair := open(t, dir, tail)
	if len(repair.Short) != 1 || repair.Short[0] != (segment.Tail{Segment: 1, Bytes: tail.Bytes - 10}) {
		t.Errorf("%+v", repair)
	}
	if p := write(t, w, "next"); p[0].Segment != 2 {
		t.Errorf("%+v", p)
	}
}

func flip(delta int) func(*testing.T, string, segment.Place) {
	return func(t *testing.T, path string, p segment.Place) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b := make([]byte, 1)
		at := int64(p.Offset) + int64(delta)
		if _, err := f.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 1
		if _, err := f.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
	}
}

func truncate(t *testing.T, path string, size int64) {
	t.Helper()
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
}

// A process that is paused and continues never writes to the files of the one that took over.
func TestTwoWritersShareNoFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	begin := func(tail segment.Tail) *segment.Writer {
		w, _ := open(t, dir, tail)
		return w
	}
	write := func(w *segment.Writer, text string) segment.Place {
		places, err := w.Append([]segment.Record{{Payload: []byte(text), CRC: segment.CRC([]byte(text))}})
		if err != nil {
			t.Fatal(err)
		}
		return places[0]
	}
	old := begin(segment.Tail{})
	first := write(old, "first")
	durable := old.Tail()
	write(old, "torn") // when it stops
	next := begin(durable)
	second := write(next, "second")
	write(old, "woken")
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	write(old, "a separate file")
	third := write(next, "third")
	if second.Segment == first.Segment || third.Segment != second.Segment {
		t.Fatalf("places %+v, %+v, %+v", first, second, third)
	}
	for place, want := range map[segment.Place]string{first: "first", second: "second", third: "third"} {
		data, err := os.ReadFile(segment.Path(dir, place.Segment))
		if err != nil {
			t.Fatal(err)
		}
		if got := string(data[place.Offset : place.Offset+place.Length]); got != want {
			t.Errorf("%+v holds %q, want %q", place, got, want)
		}
	}
}
