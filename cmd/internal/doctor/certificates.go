package doctor

import (
	"context"
	"time"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// certificates checks the expiry of certificates, their chain to the authority, and the permissions
// of keys.
func certificates(_ context.Context, p Input, r *report) {
	t, n, c := p.Config.TLS, p.Config.NATS, p.Config.Consul
	seen := false
	for _, one := range []struct {
		key   string
		files cert.Files
	}{
		{"tls.cert_file", cert.Files{Cert: t.CertFile, Key: t.KeyFile, CA: t.CAFile}},
		{"tls.worker_cert_file", cert.Files{Cert: t.WorkerCertFile, Key: t.WorkerKeyFile, CA: t.CAFile}},
		{"nats.cert_file", cert.Files{Cert: n.CertFile, Key: n.KeyFile}}, // the servers may have another authority
		{"consul.cert_file", cert.Files{Cert: c.CertFile, Key: c.KeyFile}},
	} {
		if one.files.Cert == "" {
			continue
		}
		seen = true
		leaf, err := cert.Check(one.files, p.Now())
		switch {
		case err != nil:
			r.fail(one.key, err, rpcerr.Fix(err))
		case p.Now().Add(7 * 24 * time.Hour).After(leaf.NotAfter):
			r.warn(one.key, "it expires at "+leaf.NotAfter.UTC().Format(time.RFC3339), "renew it with `rollout certs renew`, and run that daily")
		default:
			r.ok(one.key, "valid until "+leaf.NotAfter.UTC().Format(time.RFC3339))
		}
	}
	if !seen {
		r.skip("certificates", "not configured")
	}
}
