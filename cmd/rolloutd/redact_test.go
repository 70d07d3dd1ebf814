package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/config"
)

// A start that fails for a secret that is wrong, or in the wrong place, says so without repeating it.
func TestNoErrorTellsASecret(t *testing.T) {
	t.Parallel()
	const planted = "hunter2"
	for name, c := range map[string]struct{ file, secret string }{
		"a token in the file":       {"[nats]\ntoken = \"" + planted + "\"", ""},
		"a password in the URL":     {"[database]\nurl = \"postgres://ada:" + planted + "@127.0.0.1:1/rollout\"", ""},
		"a password in the NATS":    {"[nats]\nurl = \"nats://ada:" + planted + "@127.0.0.1:1\"", ""},
		"a secret in the bucket":    {"[blob]\nurl = \"s3://id:" + planted + "@bucket\"", ""},
		"a secret in the endpoint":  {"[blob]\nurl = \"s3://bucket\"\nendpoint = \"http://id:" + planted + "@127.0.0.1:1\"", ""},
		"a database that is no URL": {"[database]\nurl = \"env:SECRET\"", "postgres://ada:" + planted + "@[127.0.0.1/%zz"},
		"a database by words":       {"[database]\nurl = \"env:SECRET\"", "host=127.0.0.1 password=" + planted},
		"an NKEY that is none":      {"[nats]\nurl = \"nats://127.0.0.1:1\"\nnkey = \"env:SECRET\"", "SU" + planted},
		"credentials that are none": {"[blob]\nurl = \"gs://bucket\"\ncredentials = \"env:SECRET\"", `{"private_key": "` + planted},
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
				t.Errorf("left with %d:\n%s", code, out.String())
			}
			if strings.Contains(out.String(), planted) {
				t.Errorf("it tells a secret:\n%s", out.String())
			}
		})
	}
}

// Workers run code of people who need neither the database nor the key of whoever started the daemon.
func TestChildrenGetNoSecretOfOurs(t *testing.T) {
	t.Parallel()
	cfg := config.Default(t.TempDir())
	cfg.Database.URL = "env:PLANTED_DATABASE"
	cfg.Blob.SecretKey, cfg.Blob.Credentials = config.Env("PLANTED_S3"), config.Env("PLANTED_GCS")
	got := childEnv(cfg, []string{
		"PATH=/bin", "PLANTED_DATABASE=x", "PLANTED_S3=x", "PLANTED_GCS=x", "ROLLOUT_API_KEY=x", "ROLLOUTD_LISTEN=x", "ROLLOUT_SIM_SECONDS=0",
	})
	if want := []string{"PATH=/bin", "ROLLOUT_SIM_SECONDS=0"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
