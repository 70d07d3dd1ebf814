package scheduler

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/credential"
)

// Credentials are renewed at half of their lifetime by the clock, wherever that jumps, and written
// again if another process has overwritten or removed them.
func TestCredentialsAreRenewed(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_800_000_000, 0)
	folder := t.TempDir()
	if err := os.Mkdir(filepath.Join(folder, "workers"), 0o700); err != nil {
		t.Fatal(err)
	}
	clock := func() time.Time { return now }
	s := &scope{
		Deps: Deps{Now: clock, Log: slog.New(slog.DiscardHandler)}, run: "run-1", incarnation: 3,
		board: newBoard(&Run{RunId: "run-1", Directory: folder}, clock),
	}
	r := newRenewal(s, credential.Claims.String)
	file, err := r.issue("learner-0", "learner")
	if err != nil {
		t.Fatal(err)
	}
	r.follow("inference-0", "inference") // an adopted worker
	adopted := filepath.Join(folder, "workers", "inference-0.token")
	read := func(path string) credential.Claims {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Error(err)
		}
		c, _ := credential.Parse(strings.TrimSpace(string(text)))
		return c
	}
	first := now
	for _, c := range []struct {
		name  string
		at    time.Time
		harm  func()
		since time.Time // when the credential of the learner was issued
	}{
		{"at the start", first, nil, first},
		{"before half of the lifetime", first.Add(29 * time.Minute), nil, first},
		{"after half of it", first.Add(31 * time.Minute), nil, first.Add(31 * time.Minute)},
		{"the clock jumps ahead", first.Add(50 * time.Hour), nil, first.Add(50 * time.Hour)},
		{"and back", first, nil, first.Add(50 * time.Hour)},
		{"a former scheduler writes", first.Add(time.Minute), func() {
			if err := os.WriteFile(file, []byte("old"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, first.Add(time.Minute)},
		{"the file is removed", first.Add(2 * time.Minute), func() {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}, first.Add(2 * time.Minute)},
	} {
		if now = c.at; c.harm != nil {
			c.harm()
		}
		r.renew(t.Context())
		want := credential.Claims{Run: "run-1", Role: "learner", Incarnation: 3, Expires: c.since.Add(credential.Lifetime).Unix()}
		if got := read(file); got != want {
			t.Errorf("%s: %v, want %v", c.name, got, want)
		}
		if got := read(adopted); got.Role != "inference" || got.Incarnation != 3 {
			t.Errorf("%s: the adopted worker has %v", c.name, got)
		}
	}
	if err := os.RemoveAll(filepath.Join(folder, "workers")); err != nil {
		t.Fatal(err)
	}
	r.renew(t.Context()) // logged
	if err := os.Mkdir(filepath.Join(folder, "workers"), 0o700); err != nil {
		t.Fatal(err)
	}
	r.renew(t.Context())
	if got := read(file); got.Role != "learner" {
		t.Errorf("after a failure the file has %v", got)
	}
}
