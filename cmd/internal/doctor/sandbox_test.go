package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTheSandboxIsReportedAsItsProbeSays(t *testing.T) {
	t.Parallel()
	for name, one := range map[string]struct {
		probe  string
		status Status
		detail string
		fix    string
	}{
		"all": {`{"ok":true,"limits":[{"name":"memory_bytes","by":"cgroup v2"},{"name":"open_files","by":"rlimit"}],"boundaries":[{"name":"landlock","by":"ABI 7"}]}`,
			OK, "memory_bytes by cgroup v2, landlock by ABI 7", ""},
		"some": {`{"ok":true,"limits":[{"name":"pids","by":"rlimit"},{"name":"cpus","by":"none","why":"w","fix":"run it as root"}],"boundaries":[]}`,
			OK, "pids by rlimit, cpus by none", ""},
		"nothing": {`{"ok":false,"error":{"reason":"ISOLATION_UNAVAILABLE","message":"namespaces are forbidden","fix":"allow them"},"limits":null}`,
			Warning, "namespaces are forbidden", "allow them"},
		"broken": {`not JSON`, Warning, "rollout-sandbox can't be run: ", "build it again"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			program := filepath.Join(t.TempDir(), "rollout-sandbox")
			if err := os.WriteFile(program, []byte("#!/bin/sh\necho '"+one.probe+"'\nexit 69\n"), 0o700); err != nil {
				t.Fatal(err)
			}
			r := &report{server: "sandbox"}
			sandbox(t.Context(), Input{Sandbox: program}, r)
			if got := r.list[0]; got.Status != one.status || !strings.HasPrefix(got.Detail, one.detail) || !strings.HasPrefix(got.Fix, one.fix) {
				t.Errorf("%+v", got)
			}
		})
	}
	r := &report{}
	if sandbox(t.Context(), Input{}, r); r.list[0].Status != Skipped {
		t.Errorf("without the program: %+v", r.list)
	}
}
