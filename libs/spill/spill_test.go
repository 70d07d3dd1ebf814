package spill

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

type pair struct{ key, value string }

// sorted adds records to a sorter, and reads them.
func sorted(t *testing.T, s *Sorter, records []pair) (out []pair) {
	t.Helper()
	for _, r := range records {
		if err := s.Add([]byte(r.key), []byte(r.value)); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // a sorter can be read again
		r, err := s.Read()
		if err != nil {
			t.Fatal(err)
		}
		out = nil
		for {
			key, value, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, pair{string(key), string(value)})
		}
	}
	return out
}

// random returns records whose keys repeat. Their values are their numbers, and padding.
func random(n, padding int) []pair {
	r := rand.New(rand.NewPCG(1, uint64(n)))
	out := make([]pair, n)
	for i := range out {
		key := binary.BigEndian.AppendUint64(nil, r.Uint64N(uint64(n)/3+1))
		out[i] = pair{string(key[r.IntN(2):]), string(append(binary.BigEndian.AppendUint32(nil, uint32(i)), make([]byte, padding)...))}
	}
	return out
}

func TestRecordsAreSorted(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		records []pair
		runs    int
	}{
		"none":                   {nil, 0},
		"in memory":              {random(1000, 0), 0},
		"in several runs":        {random(9000, 2000), 9},
		"larger than the memory": {[]pair{{"b", string(make([]byte, collected+1))}, {"a", "2"}, {"b", "3"}, {"", ""}}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder := t.TempDir()
			s := New(folder)
			got := sorted(t, s, c.records)
			want := slices.Clone(c.records)
			slices.SortStableFunc(want, func(x, y pair) int { return cmp.Compare(x.key, y.key) })
			if !slices.Equal(got, want) || len(s.runs) != c.runs {
				t.Errorf("%d records, want %d; %d runs, want %d", len(got), len(want), len(s.runs), c.runs)
			}
			if left, err := filepath.Glob(filepath.Join(folder, "*")); err != nil || len(left) > 0 {
				t.Errorf("%v, left %v", err, left)
			}
			if err := errors.Join(s.Close(), s.Close()); err != nil {
				t.Error(err)
			}
		})
	}
}

// What is added almost in order is one run, however much it is: nothing has to be merged.
func TestRecordsAlmostInOrderAreOneRun(t *testing.T) {
	t.Parallel()
	want := random(9000, 2000)
	slices.SortStableFunc(want, func(x, y pair) int { return cmp.Compare(x.key, y.key) })
	records := slices.Clone(want)
	for some := range slices.Chunk(records, 100) {
		slices.SortStableFunc(some, func(x, y pair) int { return -cmp.Compare(x.key, y.key) })
	}
	for name, records := range map[string][]pair{"in order": want, "almost in order": records} {
		s := New(t.TempDir())
		defer s.Close()
		if got := sorted(t, s, records); !slices.Equal(got, want) || len(s.runs) != 1 {
			t.Errorf("%s: %d records in %d runs", name, len(got), len(s.runs))
		}
	}
}

func TestReadersDoNotDisturbEachOther(t *testing.T) {
	t.Parallel()
	s := New(t.TempDir())
	defer s.Close()
	want := sorted(t, s, random(9000, 2000))
	one, err := s.Read()
	if err != nil {
		t.Fatal(err)
	}
	other, err := s.Read()
	if err != nil {
		t.Fatal(err)
	}
	for i := range want {
		key, value, err := one.Next()
		again, same, err2 := other.Next()
		if err != nil || err2 != nil || string(key) != want[i].key || string(value) != want[i].value || !bytes.Equal(key, again) || !bytes.Equal(value, same) {
			t.Fatalf("record %d: %v, %v", i, err, err2)
		}
	}
}

func TestAFolderThatCannotBeWrittenIsReported(t *testing.T) {
	t.Parallel()
	s := New(filepath.Join(t.TempDir(), "missing"))
	defer s.Close()
	var err error
	for _, r := range random(5000, 2000) {
		if err = s.Add([]byte(r.key), []byte(r.value)); err != nil {
			break
		}
	}
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}
