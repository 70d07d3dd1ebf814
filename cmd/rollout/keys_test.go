package main

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
)

// TestKeys runs the commands in order on one folder, a day apart. Only `create` prints a key, and
// no file contains it.
func TestKeys(t *testing.T) {
	t.Parallel()
	for _, format := range []string{cli.FormatText, cli.FormatJSON} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			home := t.TempDir()
			now := noon
			c := call{env: map[string]string{"HOME": home}, now: func() time.Time { return now }}
			var log strings.Builder
			var secrets []string
			run := func(line string) {
				t.Helper()
				args := append(strings.Fields(line), "--state-dir", filepath.Join(home, "state"))
				if format == cli.FormatJSON {
					args = append(args, "--format", "json")
				}
				got := c.run(t, append([]string{"keys"}, args...)...)
				for _, secret := range secrets {
					if strings.Contains(got.text(), secret) {
						t.Errorf("`keys %s` tells a key again:\n%s", line, got.text())
					}
				}
				text := got.text()
				if got.code == 0 && strings.HasPrefix(line, "create") {
					secret := created(t, format, got.stdout)
					secrets = append(secrets, secret)
					text = strings.ReplaceAll(text, secret, "KEY")
				}
				log.WriteString("$ rollout keys " + line + "\n" + text)
				now = now.Add(24 * time.Hour)
			}
			run("list")
			run("create ada --scope submit")
			run("create ci")
			run("create ada --scope admin")
			run("create bob --scope root")
			run("create Not-A-Name!")
			run("create")
			run("list")
			run("revoke ada")
			run("revoke ada")
			run("list")
			golden(t, "testdata/keys."+format, strings.ReplaceAll(log.String(), home, "HOME"))
		})
	}
}

// created is the key that `create` printed.
func created(t *testing.T, format, stdout string) string {
	t.Helper()
	if format == cli.FormatText {
		return strings.TrimSpace(stdout)
	}
	var made struct{ Key string }
	if err := json.Unmarshal([]byte(stdout), &made); err != nil || made.Key == "" {
		t.Fatalf("no key in %q: %v", stdout, err)
	}
	return made.Key
}
