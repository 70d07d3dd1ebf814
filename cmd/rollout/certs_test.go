package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestCerts runs the commands in order on one folder, and renews 25 days later.
func TestCerts(t *testing.T) {
	t.Parallel()
	home := t.TempDir()
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	const day = 24 * time.Hour
	now := time.Now()
	c := call{env: map[string]string{"HOME": home}, now: func() time.Time { return now }}
	var log strings.Builder
	run := func(args ...string) {
		t.Helper()
		got := c.run(t, append([]string{"certs"}, args...)...)
		log.WriteString("$ rollout certs " + strings.Join(args, " ") + "\n" + got.text())
	}
	run("show")
	run("issue", "person", "ada")
	run("init")
	run("init")
	run("issue", "service", "control", "--host", "control.internal")
	run("issue", "worker", "gpu", "--days", "7")
	run("issue", "person", "ada", "--days", "90")
	run("issue", "robot", "x")
	run("issue", "service", "control", "--host", "h:1")
	run("issue", "person", "ada", "--days", "0")
	run("issue", "person", "ada", "--days", "999999999") // more than a duration holds
	now = now.Add(25 * day)
	run("show")
	run("renew")
	run("renew")
	run("renew", "worker-none")
	run("renew", "--all", "person-ada")
	if err := os.Chmod(filepath.Join(home, ".config/rollout/certs/service-control-key.pem"), 0o644); err != nil {
		t.Fatal(err)
	}
	run("show")
	text := strings.NewReplacer(home, "HOME").Replace(log.String())
	for _, host := range []string{"127.0.0.1", "::1", name} { // Go orders names before addresses
		text = strings.ReplaceAll(text, host+" ", "")
	}
	for days := range 130 {
		text = strings.ReplaceAll(text, now.Add(time.Duration(days-25)*day).UTC().Format("2006-01-02 15:04:05"), fmt.Sprint("DAY", days))
		text = strings.ReplaceAll(text, now.Add(time.Duration(days-25)*day).UTC().Format(time.RFC3339), "DAY")
	}
	text = strings.ReplaceAll(text, now.Add((3650-25)*day).UTC().Format("2006-01-02 15:04:05"), "LAST")
	golden(t, "testdata/certs.text", squeeze(text))
}

// squeeze removes the padding of tables: its width depends on the name of this machine.
func squeeze(text string) string {
	var out []string
	for line := range strings.SplitSeq(text, "\n") {
		out = append(out, strings.Join(strings.Fields(line), " "))
	}
	return strings.Join(out, "\n")
}
