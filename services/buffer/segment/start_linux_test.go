package segment_test

import (
	"os"
	"testing"

	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// Writing may begin before the sync, which waits for it and tells what became of it.
func TestASyncTellsWhatFailedBeforeIt(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w, _, err := segment.Open(segment.Config{Dir: dir, RollBytes: roll, Datasync: func(*os.File) error { return nil }}, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	l, place := lend(t, w, "written")
	for _, at := range []segment.Place{place, {Offset: 1}, {Offset: 1 << 63, Length: 1 << 63}} { // what a producer says may be anything
		l.Start(at, at)
	}
	if err := l.Sync(); err != nil {
		t.Error(err)
	}
	if err := read(dir, place, "written"); err != nil {
		t.Error(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l.Start(place, place)
	if l.Sync() == nil {
		t.Error("a write that could not begin is forgotten")
	}
}
