package doctor

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/servertest"
)

func TestCertificates(t *testing.T) {
	t.Parallel()
	ca, other := servertest.NewCA(t), servertest.NewCA(t)
	certFile, keyFile := ca.Issue(t, "mesh")
	look := func(authority string, at time.Time) Finding {
		var r report
		certificates(t.Context(), Input{
			Config: config.Config{TLS: config.TLS{CertFile: certFile, KeyFile: keyFile, CAFile: authority}}, Now: func() time.Time { return at },
		}, &r)
		return r.list[0]
	}
	now := time.Now()
	for says, f := range map[string]Finding{"does not lead": look(other.File, now), "it ended": look(ca.File, now.Add(time.Hour))} {
		if f.Status != Failed || !strings.Contains(f.Detail, says) || f.Fix == "" {
			t.Errorf("%s: %+v", says, f)
		}
	}
	if f := look(ca.File, now); f.Status != Warning || !strings.Contains(f.Fix, "certs renew") { // it lives for half an hour
		t.Errorf("%+v", f)
	}
	if err := os.Chmod(keyFile, 0o644); err != nil {
		t.Fatal(err)
	}
	if f := look(ca.File, now); f.Status != Failed || !strings.Contains(f.Fix, "chmod 600") {
		t.Errorf("%+v", f)
	}
}
