//go:build servers

package doctor_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/doctor"
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/servertest"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
)

const management = "6f3c1d6e-0f53-4a86-9c0f-6d1f6a0c7a13"

// healthy is a configuration with external servers.
func healthy(t *testing.T) doctor.Input {
	t.Helper()
	dir := t.TempDir()
	secret := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	s3 := servertest.StartS3(t)
	if err := os.Mkdir(filepath.Join(s3.Dir, "rollout"), 0o700); err != nil {
		t.Fatal(err)
	}
	c := config.Default(dir)
	c.NATS.URL = servertest.StartNATS(t, servertest.NATSOptions{Token: "s3cret"}).URL()
	c.NATS.Token = config.File(secret("nats", "s3cret"))
	c.Consul.Address = servertest.StartConsul(t, servertest.ConsulOptions{Token: management}).Address
	c.Consul.Token = config.File(secret("consul", management))
	c.Blob = config.Blob{URL: "s3://rollout/mesh", Endpoint: s3.Endpoint, AccessKey: s3.AccessKey, SecretKey: config.File(secret("s3", s3.SecretKey))}
	place := sqldbtest.Place(t)
	c.Database.URL = place.URL
	return doctor.Input{Config: c, Now: time.Now}
}

func find(findings []doctor.Finding, server, check string) doctor.Finding {
	for _, f := range findings {
		if f.Server == server && f.Check == check {
			return f
		}
	}
	return doctor.Finding{}
}

func TestEverythingIsFound(t *testing.T) {
	t.Parallel()
	p := healthy(t)
	findings := doctor.Check(t.Context(), p)
	for _, f := range findings {
		standbys := f.Check == "replication" && f.Status == doctor.Skipped                                             // there is none
		if f.Status != doctor.OK && !standbys && f.Server != "tls" && f.Server != "sandbox" && f.Server != "process" { // the last two look at the host
			t.Errorf("of healthy servers: %+v", f)
		}
	}
	for _, want := range [][2]string{
		{"database", "permissions"}, {"database", "clock"}, {"nats", "max_payload"}, {"nats", "write"}, {"nats", "streams"}, {"consul", "permissions"},
		{"blob", "create once"}, {"blob", "delete"}, {"blob", "clock"}, {"state", "disk"},
	} {
		if find(findings, want[0], want[1]).Status != doctor.OK {
			t.Errorf("%s %s was not looked at: %+v", want[0], want[1], findings)
		}
	}

	wrong := p
	bad := filepath.Join(t.TempDir(), "bad")
	if err := os.WriteFile(bad, []byte("wrong-secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	wrong.Config.NATS.Token, wrong.Config.Consul.Token, wrong.Config.Blob.URL = config.File(bad), config.File(bad), "s3://missing"
	wrong.Now = func() time.Time { return time.Now().Add(time.Hour) }
	findings = doctor.Check(t.Context(), wrong)
	for _, want := range []struct {
		server, check, fix string
		status             doctor.Status
	}{
		{"nats", "reach", "nats.token", doctor.Failed}, {"consul", "reach", "consul.token", doctor.Failed},
		{"blob", "reach", "blob.url", doctor.Failed}, {"database", "clock", "NTP", doctor.Warning},
	} {
		if f := find(findings, want.server, want.check); f.Status != want.status || !strings.Contains(f.Fix, want.fix) {
			t.Errorf("%+v, found %+v", want, f)
		}
		for _, f := range findings {
			if strings.Contains(f.Detail+f.Fix, "wrong-secret") {
				t.Errorf("%+v tells a secret", f)
			}
		}
	}
}

// A failover to an asynchronous standby loses what was committed last.
func TestAsynchronousStandby(t *testing.T) {
	t.Parallel()
	primary, err := sqldbtest.Start()
	if err != nil {
		t.Fatal(err)
	}
	c := config.Default(t.TempDir())
	c.Database.URL = primary.URL
	replication := func() doctor.Finding {
		return find(doctor.Check(t.Context(), doctor.Input{Config: c, Now: time.Now}), "database", "replication")
	}
	if f := replication(); f.Status != doctor.Skipped {
		t.Errorf("without a standby: %+v", f)
	}
	if _, err := primary.Standby(t.Context(), "standby"); err != nil {
		t.Fatal(err)
	}
	if f := replication(); f.Status != doctor.OK {
		t.Errorf("synchronous: %+v", f)
	}
	if err := primary.Exec(t.Context(), "ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()", "SELECT pg_sleep(0.2)"); err != nil {
		t.Fatal(err)
	}
	if f := replication(); f.Status != doctor.Warning || !strings.Contains(f.Fix, "synchronous_standby_names") {
		t.Errorf("asynchronous: %+v", f)
	}
}

// Servers that cannot store the messages of a run, and an account that may not create our streams.
func TestNATSWithoutRoom(t *testing.T) {
	t.Parallel()
	c := config.Default(t.TempDir())
	c.NATS.URL = servertest.StartNATS(t, servertest.NATSOptions{MaxFile: "4MB"}).URL()
	f := find(doctor.Check(t.Context(), doctor.Input{Config: c, Now: time.Now}), "nats", "write")
	if f.Status != doctor.Failed || !strings.Contains(f.Detail, "servers are full") || !strings.Contains(f.Fix, "max_file") {
		t.Errorf("found %+v", f)
	}
}
