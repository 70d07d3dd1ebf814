package main

import (
	"path/filepath"
	"testing"
)

// The configuration file is checked before rolloutd is started.
func TestDaemonIsConfigured(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.toml")
	write(t, bad, "drian = \"3s\"\n")
	for file, code := range map[string]int{bad: 65, filepath.Join(dir, "none.toml"): 66} {
		if got := (call{}).run(t, "daemon", "start", "--state-dir", dir, "--config", file); got.code != code {
			t.Errorf("%s: %s", file, got.text())
		}
	}
}
