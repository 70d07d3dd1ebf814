package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Servers that do not answer, and an invalid configuration.
func TestDoctor(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"embedded": "",
		"down":     "[nats]\nurl = \"nats://127.0.0.1:1\"\n[consul]\naddress = \"127.0.0.1:1\"\n",
		"inline":   "[nats]\ntoken = \"hunter2\"\n[blob]\nurl = \"s3://id:hunter2@bucket\"\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			file := filepath.Join(dir, "rolloutd.toml")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			got := call{env: map[string]string{"HOME": dir}}.run(t, "doctor", "--config", file, "--state-dir", filepath.Join(dir, "state")).text()
			if strings.Contains(got, "hunter2") {
				t.Errorf("it tells a secret:\n%s", got)
			}
			// This test does not depend on the free space of the disk, and the sandbox and the CRIU of the
			// host.
			got = regexp.MustCompile(`(?m)^.* (state +disk|sandbox +limits|process +checkpoint) .*\n( +fix: .*\n)?`).ReplaceAllString(strings.ReplaceAll(got, dir, "DIR"), "")
			got = regexp.MustCompile(`(?m)^\d+ ok, \d+ warnings`).ReplaceAllString(got, "N ok, N warnings")
			golden(t, filepath.Join("testdata/doctor", name+".text"), got)
		})
	}
}
