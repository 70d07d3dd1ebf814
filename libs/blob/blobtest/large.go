package blobtest

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/rollout-rl/rollout/libs/blob"
)

// LargeBytes is the size of the suite's large blobs; adapters that upload in parts set parts well
// below it.
const LargeBytes = 11<<20 + 17

// Noise is bytes that differ from each other, the same for a seed.
func Noise(seed byte, size int) []byte {
	data := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(data) // never fails
	return data
}

func large(t *testing.T, s blob.Store) {
	data := Noise(1, LargeBytes)
	info, err := s.Put(t.Context(), "big", iotest.HalfReader(bytes.NewReader(data)))
	if err != nil || info.Size != LargeBytes {
		t.Fatalf("put: %+v %v", info, err)
	}
	if got := read(t, s, "big", blob.Range{}); got != string(data) {
		t.Error("other bytes came back")
	}
	for _, r := range []blob.Range{{Offset: 5<<20 - 3, Length: 7}, {Offset: LargeBytes - 1}, {Length: 1}} {
		end := r.Offset + r.Length
		if r.Length == 0 {
			end = LargeBytes
		}
		if got := read(t, s, "big", r); got != string(data[r.Offset:end]) {
			t.Errorf("range %+v: other bytes", r)
		}
	}
	boom := errors.New("boom")
	late := io.MultiReader(bytes.NewReader(data), iotest.ErrReader(boom))
	if _, err := s.Put(t.Context(), "failed", late); !errors.Is(err, boom) {
		t.Errorf("a source that fails late: %v", err)
	}
	if _, err := s.Stat(t.Context(), "failed"); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("after a source that failed late: %v", err)
	}
	if _, err := s.Put(t.Context(), "big", bytes.NewReader(data)); !errors.Is(err, blob.ErrExists) {
		t.Errorf("again: %v", err)
	}
}

func oneLargeWins(t *testing.T, s blob.Store) {
	const n = 3
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() { _, errs[i] = s.Put(t.Context(), "contested", bytes.NewReader(Noise(byte(i), LargeBytes))) })
	}
	wg.Wait()
	winner := -1
	for i, err := range errs {
		switch {
		case err == nil && winner < 0:
			winner = i
		case err == nil:
			t.Errorf("both %d and %d won", winner, i)
		case !errors.Is(err, blob.ErrExists):
			t.Errorf("writer %d: %v", i, err)
		}
	}
	if winner < 0 {
		t.Fatal("no writer succeeded")
	}
	if got := read(t, s, "contested", blob.Range{}); got != string(Noise(byte(winner), LargeBytes)) {
		t.Error("the content is not the winner's")
	}
}
