package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/cmd/internal/doctor"
)

// What each kind of finding looks like.
func TestFindings(t *testing.T) {
	t.Parallel()
	findings := []doctor.Finding{
		{Server: "state", Check: "disk", Status: doctor.OK, Detail: "enough is free"},
		{Server: "database", Check: "reach", Status: doctor.Skipped, Detail: "SQLite files in the state folder"},
		{Server: "nats", Check: "streams", Status: doctor.Warning, Detail: "not 3 replicas: EVENTS has 1", Fix: "start rolloutd"},
		{Server: "blob", Check: "write", Status: doctor.Failed, Detail: "refused", Fix: "allow creating objects"},
	}
	for _, format := range []string{formatText, formatJSON} {
		var out bytes.Buffer
		if err := writeFindings(&out, format, findings); err != nil {
			t.Fatal(err)
		}
		golden(t, filepath.Join("testdata/doctor", "findings."+format), out.String())
	}
}

// Servers that nobody serves, and a configuration that is wrong.
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
			got := command{env: map[string]string{"HOME": dir}}.run(t, "doctor", "--config", file, "--state-dir", filepath.Join(dir, "state")).text()
			if strings.Contains(got, "hunter2") {
				t.Errorf("it tells a secret:\n%s", got)
			}
			// Whether this machine's disk has room is not what is tested.
			got = regexp.MustCompile(`(?m)^.* state +disk .*\n( +fix: .*\n)?`).ReplaceAllString(strings.ReplaceAll(got, dir, "DIR"), "")
			got = regexp.MustCompile(`(?m)^\d+ ok, \d+ warnings`).ReplaceAllString(got, "N ok, N warnings")
			golden(t, filepath.Join("testdata/doctor", name+".text"), got)
		})
	}
}
