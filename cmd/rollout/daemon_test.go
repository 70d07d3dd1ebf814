package main

import (
	"path/filepath"
	"slices"
	"testing"
)

// What rolloutd is told to read is there and is whole, wherever rolloutd runs.
func TestDaemonIsConfigured(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good.toml"), filepath.Join(dir, "bad.toml")
	write(t, good, "drain = \"3s\"\n")
	write(t, bad, "drian = \"3s\"\n")
	if args, err := configured(good, dir, []string{"HOME=" + dir}); err != nil || !slices.Equal(args, []string{"--config", good}) {
		t.Errorf("%v %v", args, err)
	}
	for file, code := range map[string]int{bad: 65, filepath.Join(dir, "none.toml"): 66} {
		if got := (command{}).run(t, "daemon", "start", "--state-dir", dir, "--config", file); got.code != code {
			t.Errorf("%s: %s", file, got.text())
		}
	}
}
