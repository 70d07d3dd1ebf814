package sqlite_test

import (
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/sqlite"
	"github.com/rollout-rl/rollout/services/scheduler/storetest"
)

func open(t *testing.T, path string) *sqlite.Store {
	t.Helper()
	s, err := sqlite.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestSuite(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) scheduler.Store { return open(t, filepath.Join(t.TempDir(), "scheduler.sqlite")) })
}

func TestAnotherProcessFindsWhatWasWritten(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "scheduler.sqlite")
	first := open(t, path)
	want, err := first.Create(t.Context(), storetest.Sample("run-1", "a", scheduler.Pending), "", scheduler.Cursor{})
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Advance(t.Context(), "run-1", 0, 7); err != nil {
		t.Fatal(err)
	}
	second := open(t, path)
	if got, err := second.Get(t.Context(), "run-1"); err != nil || !proto.Equal(got, want) {
		t.Fatalf("got %v, %v", got, err)
	}
	if got, err := second.Cursor(t.Context(), "run-1"); err != nil || got.Position != 7 {
		t.Fatalf("cursor %+v, %v", got, err)
	}
}
