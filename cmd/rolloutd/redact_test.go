package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// An error about a wrong secret does not contain the secret.
func TestNoErrorTellsASecret(t *testing.T) {
	t.Parallel()
	const planted = "hunter2"
	for name, c := range map[string]struct{ file, secret string }{
		"a token in the file":      {"[nats]\ntoken = \"" + planted + "\"", ""},
		"a password in the URL":    {"[database]\nurl = \"postgres://ada:" + planted + "@127.0.0.1:1/rollout\"", ""},
		"a password in the NATS":   {"[nats]\nurl = \"nats://ada:" + planted + "@127.0.0.1:1\"", ""},
		"a secret in the bucket":   {"[blob]\nurl = \"s3://id:" + planted + "@bucket\"", ""},
		"a secret in the endpoint": {"[blob]\nurl = \"s3://bucket\"\nendpoint = \"http://id:" + planted + "@127.0.0.1:1\"", ""},
		"an invalid database URL":  {"[database]\nurl = \"env:SECRET\"", "postgres://ada:" + planted + "@[127.0.0.1/%zz"},
		"a database by words":      {"[database]\nurl = \"env:SECRET\"", "host=127.0.0.1 password=" + planted},
		"an invalid NKEY":          {"[nats]\nurl = \"nats://127.0.0.1:1\"\nnkey = \"env:SECRET\"", "SU" + planted},
		"invalid credentials":      {"[blob]\nurl = \"gs://bucket\"\ncredentials = \"env:SECRET\"", `{"private_key": "` + planted},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			file := filepath.Join(dir, "rolloutd.toml")
			if err := os.WriteFile(file, []byte(c.file+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			var out bytes.Buffer
			code := run(ctx, ctx, []string{"--config", file, "--state-dir", filepath.Join(dir, "state")}, []string{"SECRET=" + c.secret, "HOME=" + dir}, &out)
			if code == 0 || out.Len() == 0 {
				t.Errorf("exited with code %d:\n%s", code, out.String())
			}
			if strings.Contains(out.String(), planted) {
				t.Errorf("the output contains a secret:\n%s", out.String())
			}
		})
	}
}
