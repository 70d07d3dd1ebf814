package config

import (
	"errors"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// ErrPlainText means that an address that other hosts can reach would be served without TLS, which
// would expose tokens.
var ErrPlainText = rpcerr.New(codes.FailedPrecondition, "PLAIN_TEXT_LISTENER", "plain text beyond loopback")

// plainText refuses listeners that would send tokens over a network in plain text, unless the
// network is declared private.
func (c Config) plainText() (errs []error) {
	if c.Insecure {
		return nil
	}
	const orPrivate = ", or insecure_listen = true where the network is private (docs/security.md)"
	for _, l := range []struct {
		key, address string
		safe         bool
		fix          string
	}{
		{"listen", c.Listen, c.TLS.CertFile != "", "set tls.cert_file and tls.key_file (`rollout certs` makes them)"},
		{"gateway.listen", c.Gateway.Listen, c.TLS.CertFile != "", "set tls.cert_file and tls.key_file (`rollout certs` makes them)"},
		{"nats.listen", c.NATS.Listen, c.TLS.Mutual(), "set tls.cert_file, tls.key_file and tls.ca_file, or use an external NATS server"},
		{"consul.listen", c.Consul.Listen, c.TLS.Mutual(), "set tls.cert_file, tls.key_file and tls.ca_file, or use Consul"},
	} {
		if !l.safe && !Loopback(l.address) {
			errs = append(errs, ErrPlainText.WithMessage("%s: %s is not loopback and would be plain text: %s%s", l.key, l.address, l.fix, orPrivate))
		}
	}
	return errs
}

func (t TLS) check() (errs []error) {
	if (t.CertFile == "") != (t.KeyFile == "") {
		errs = append(errs, errors.New("tls: cert_file and key_file go together"))
	}
	if (t.WorkerCertFile == "") != (t.WorkerKeyFile == "") {
		errs = append(errs, errors.New("tls: worker_cert_file and worker_key_file go together"))
	}
	if t.WorkerCertFile != "" && !t.Mutual() {
		errs = append(errs, errors.New("tls: workers show a certificate where TLS is mutual: set cert_file, key_file and ca_file too"))
	}
	return errs
}
