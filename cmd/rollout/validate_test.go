package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A local validation asks rolloutd, which starts no services, and makes no state folder.
func TestValidateStartsNoDaemon(t *testing.T) {
	dir := project(t)
	bin, state := t.TempDir(), filepath.Join(t.TempDir(), "state")
	t.Setenv("PATH", bin)
	validate := func() result {
		return execute(t, nil, "validate", "--config", filepath.Join(dir, "run.toml"), "--state-dir", state)
	}
	if got := validate(); got.code != 69 || !strings.Contains(got.stderr, "rolloutd was not found") {
		t.Errorf("without rolloutd: %s", got.text())
	}
	// The response of this program has no problem and no configuration.
	if err := os.WriteFile(filepath.Join(bin, "rolloutd"), []byte("#!/bin/sh\n[ \"$*\" = validate-config ]\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if got := validate(); got.code != 0 || got.text() != "--- exit 0\n" {
		t.Errorf("with rolloutd: %s", got.text())
	}
	if _, err := os.Stat(state); err == nil {
		t.Error("validate made the state folder")
	}
}
