package doctor_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/doctor"
	"github.com/rollout-rl/rollout/libs/config"
)

// No finding contains a secret, whatever is wrong with servers and credentials. Parsers quote
// malformed text, so malformed secrets are tested too.
func TestNoFindingTellsASecret(t *testing.T) {
	t.Parallel()
	const planted = "hunter2"
	key := filepath.Join(t.TempDir(), "key.pem")
	if err := os.WriteFile(key, []byte("-----BEGIN PRIVATE KEY-----\n"+planted+"\n-----END PRIVATE KEY-----\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const nowhere = "127.0.0.1:1"
	for name, set := range map[string]func(c *config.Config) (secret string){
		"database": func(c *config.Config) string {
			c.Database.URL = "env:SECRET"
			return "postgres://ada:" + planted + "@" + nowhere + "/rollout?sslmode=disable"
		},
		"invalid database URL": func(c *config.Config) string {
			c.Database.URL = "env:SECRET"
			return "postgres://ada:" + planted + "@[" + nowhere + "/%zz"
		},
		"database by words": func(c *config.Config) string {
			c.Database.URL = "env:SECRET"
			return "host=127.0.0.1 port=1 password=" + planted
		},
		"nats token": func(c *config.Config) string { c.NATS.Token = config.Env("SECRET"); return planted },
		"nats password": func(c *config.Config) string {
			c.NATS.User, c.NATS.Password = "ada", config.Env("SECRET")
			return planted
		},
		"nats nkey": func(c *config.Config) string { c.NATS.NKey = config.Env("SECRET"); return "SU" + planted },
		"nats key": func(c *config.Config) string {
			c.NATS.CAFile, c.NATS.CertFile, c.NATS.KeyFile = key, key, key
			return planted
		},
		"consul": func(c *config.Config) string {
			c.Consul.Address, c.Consul.Token = nowhere, config.Env("SECRET")
			return planted
		},
		"s3": func(c *config.Config) string {
			c.Blob = config.Blob{URL: "s3://bucket", Endpoint: "http://" + nowhere, AccessKey: "id", SecretKey: config.Env("SECRET")}
			return planted
		},
		"gcs": func(c *config.Config) string {
			c.Blob = config.Blob{URL: "gs://bucket", Credentials: config.Env("SECRET")}
			return fmt.Sprintf(`{"type": "service_account", "private_key": %q, "client_email": "a@b", "token_uri": "http://%s"}`, planted, nowhere)
		},
		"gcs credentials that are not JSON": func(c *config.Config) string {
			c.Blob = config.Blob{URL: "gs://bucket", Credentials: config.Env("SECRET")}
			return planted
		},
		"tls": func(c *config.Config) string {
			c.TLS.CAFile, c.TLS.CertFile, c.TLS.KeyFile = key, key, key
			return planted
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := config.Default(t.TempDir())
			c.NATS.URL = "nats://" + nowhere
			environ := []string{"SECRET=" + set(&c)}
			bad := 0
			for _, f := range doctor.Check(t.Context(), doctor.Input{Config: c, Environ: environ, Now: time.Now}) {
				if strings.Contains(fmt.Sprintf("%+v", f), planted) {
					t.Errorf("%+v tells the secret", f)
				}
				if f.Status == doctor.Failed {
					bad++
				}
			}
			if bad == 0 {
				t.Error("nothing was wrong, so nothing was tested")
			}
		})
	}
}
