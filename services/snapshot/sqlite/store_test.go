package sqlite_test

import (
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/services/snapshot"
	"github.com/rollout-rl/rollout/services/snapshot/sqlite"
	"github.com/rollout-rl/rollout/services/snapshot/storetest"
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
	storetest.Run(t, func(t *testing.T) snapshot.Store { return open(t, filepath.Join(t.TempDir(), "snapshot.sqlite")) })
}

func TestAnotherProcessFindsWhatWasWritten(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "snapshot.sqlite")
	want := storetest.Snap("snap-1", "run-a", 1, "a")
	if _, err := open(t, path).Record(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	got, err := open(t, path).Get(t.Context(), "snap-1")
	if err != nil || !proto.Equal(got, want) {
		t.Fatalf("got %v, %v", got, err)
	}
}
