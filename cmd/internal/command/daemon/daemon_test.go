package daemon

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestConfigFileIsPassedToRolloutd(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "rolloutd.toml")
	if err := os.WriteFile(file, []byte("drain = \"3s\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if args, err := configured(file, dir, []string{"HOME=" + dir}); err != nil || !slices.Equal(args, []string{"--config", file}) {
		t.Errorf("%v %v", args, err)
	}
}
