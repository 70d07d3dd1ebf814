package sqlite_test

import (
	"path/filepath"
	"testing"

	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/sqlite"
	"github.com/rollout-rl/rollout/services/buffer/storetest"
)

func TestSuite(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T, folder string) buffer.Store {
		t.Helper()
		s, err := sqlite.Open(t.Context(), filepath.Join(folder, "buffer.sqlite"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
		return s
	})
}
