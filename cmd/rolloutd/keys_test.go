package main

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/sqldb"
	gatewaystore "github.com/rollout-rl/rollout/services/gateway/sqlstore"
)

// The keys of a file of an earlier version are imported once.
func TestFilesOfKeysAreImported(t *testing.T) {
	t.Parallel()
	folder, joined := t.TempDir(), t.TempDir()
	store, err := gatewaystore.Open(t.Context(), sqldb.Files(folder))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	write := func(dir, text string) (path string) {
		t.Helper()
		path = filepath.Join(dir, "api-keys.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	record := func(name string) string {
		return `{"name":"` + name + `","scope":"submit","sha256":"` + apikey.Hash(name) + `","created":"2026-11-25T01:02:03Z","requestsPerMinute":3}`
	}
	check := func(want ...string) {
		t.Helper()
		if err := importKeys(t.Context(), store, slog.New(slog.DiscardHandler), folder, joined, ""); err != nil {
			t.Fatal(err)
		}
		_, keys, err := store.Keys(t.Context(), 0)
		if err != nil || len(keys) != len(want) {
			t.Fatalf("got %v, %v, want %v", keys, err, want)
		}
		for i, k := range keys {
			if k.GetName() != want[i] || k.GetSha256() != apikey.Hash(want[i]) || k.GetRequestsPerMinute() != 3 || k.GetCreated().AsTime().Year() != 2026 {
				t.Errorf("got %v, want %s", k, want[i])
			}
		}
	}
	check()
	own := write(folder, "["+record("ada")+","+record("bob")+"]")
	write(joined, "["+record("ada")+","+record("eve")+"]")
	check("ada", "bob", "eve")
	if _, err := os.Stat(own); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is still there: %v", err)
	}
	if _, err := store.RemoveKey(t.Context(), "ada"); err != nil {
		t.Fatal(err)
	}
	check("bob", "eve") // a revoked key does not come back
	write(folder, "{")
	if err := importKeys(t.Context(), store, slog.New(slog.DiscardHandler), folder); !errors.Is(err, apikey.ErrFile) {
		t.Errorf("a broken file: %v", err)
	}
}
