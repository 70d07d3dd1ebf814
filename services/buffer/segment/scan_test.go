package segment_test

import (
	"errors"
	"os"
	"testing"

	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// small writes a segment of two records and returns its folder, its contents, and the places of the
// payloads.
func small(t *testing.T) (dir string, whole []byte, places []segment.Place) {
	t.Helper()
	dir = t.TempDir()
	w, _ := open(t, dir, segment.Tail{})
	places = write(t, w, "the first", "the second")
	whole, err := os.ReadFile(segment.Path(dir, 1))
	if err != nil {
		t.Fatal(err)
	}
	return dir, whole, places
}

func put(t *testing.T, dir string, data []byte) {
	t.Helper()
	if err := os.WriteFile(segment.Path(dir, 1), data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// start is the offset of a record.
func start(p segment.Place) uint64 { return p.Offset - segment.HeaderBytes }

func scan(t *testing.T, dir string, durable int) segment.Report {
	t.Helper()
	r, err := segment.Scan(dir, 1, uint64(durable))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A flipped bit anywhere is reported at its record. That record cannot be read, the other one can.
func TestEveryFlippedBitIsFound(t *testing.T) {
	t.Parallel()
	dir, whole, places := small(t)
	if r := scan(t, dir, len(whole)); r.Flaw != "" || r.Bytes != uint64(len(whole)) {
		t.Fatalf("%+v", r)
	}
	for at := range whole {
		for bit := range 8 {
			spoiled := append([]byte(nil), whole...)
			spoiled[at] ^= 1 << bit
			put(t, dir, spoiled)
			r := scan(t, dir, len(whole))
			hit := -1 // the magic, without which no record can be read
			for n, p := range places {
				if uint64(at) >= start(p) {
					hit = n
				}
			}
			want := uint64(0)
			if hit >= 0 {
				want = start(places[hit])
			}
			if r.Flaw == "" || r.Offset != want {
				t.Errorf("byte %d bit %d: %+v, want a flaw at %d", at, bit, r, want)
			}
			for n, text := range []string{"the first", "the second"} {
				err := read(dir, places[n], text)
				if bad := hit < 0 || hit == n; bad != errors.Is(err, segment.ErrDamaged) || !bad && err != nil {
					t.Errorf("byte %d bit %d: record %d: %v", at, bit, n, err)
				}
			}
		}
	}
}

// A segment that is cut off anywhere is reported, and no incomplete record can be read.
func TestEveryTruncationIsFound(t *testing.T) {
	t.Parallel()
	dir, whole, places := small(t)
	for length := range whole {
		put(t, dir, whole[:length])
		if r := scan(t, dir, len(whole)); r.Flaw == "" || r.Bytes != uint64(length) || r.Offset > uint64(length) {
			t.Errorf("%d bytes: %+v", length, r)
		}
		for n, text := range []string{"the first", "the second"} {
			err := read(dir, places[n], text)
			if cut := uint64(length) < places[n].Offset+places[n].Length; cut != errors.Is(err, segment.ErrDamaged) || !cut && err != nil {
				t.Errorf("%d bytes: record %d: %v", length, n, err)
			}
		}
	}
}

// Bytes after the durable end are from a crash and are not an error.
func TestBytesAfterTheDurableEndAreNotAFlaw(t *testing.T) {
	t.Parallel()
	dir, whole, _ := small(t)
	put(t, dir, append(whole, 0xff, 0xff, 0xff))
	if r := scan(t, dir, len(whole)); r.Flaw != "" {
		t.Errorf("%+v", r)
	}
	if err := os.Remove(segment.Path(dir, 1)); err != nil {
		t.Fatal(err)
	}
	if r := scan(t, dir, len(whole)); !r.Missing {
		t.Errorf("%+v", r)
	}
}
