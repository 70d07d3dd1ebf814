//go:build linux

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestFilesOfTheCallerAreNotInherited(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, []byte("inherited-secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	secret, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer secret.Close()
	run := exec.Command(built.sandbox, "run", "--", "sh", "-c", "echo /proc/self/fd/*; cat /proc/self/fd/9")
	run.ExtraFiles = []*os.File{6: secret} // descriptor 9
	out, err := run.CombinedOutput()
	if strings.Contains(string(out), "ISOLATION_UNAVAILABLE") {
		t.Skipf("this host builds no boxes: %s", out)
	}
	if err != nil || strings.Contains(string(out), "inherited-secret") || strings.Contains(string(out), "/proc/self/fd/4") {
		t.Errorf("the command sees a file of the caller: %v %s", err, out)
	}
}
