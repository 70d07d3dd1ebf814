// Package backend connects to the servers that rolloutd.toml names, for rolloutd and for the doctor.
package backend

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/config"
)

// NATS reads the credentials that the configuration names. Without any the mesh token is one. URL and Log are the caller's.
func NATS(c config.NATS, meshToken string, environ []string) (o bus.Options, err error) {
	o.User, o.Replicas = c.User, c.Replicas
	if o.Token, err = config.Secret("nats.token", c.TokenFile, c.TokenEnv, environ); err != nil {
		return o, err
	}
	if o.Password, err = config.Secret("nats.password", c.PasswordFile, c.PasswordEnv, environ); err != nil {
		return o, err
	}
	if o.NKeySeed, err = config.Secret("nats.nkey", c.NKeyFile, "", environ); err != nil {
		return o, err
	}
	if o.Token+o.User+o.NKeySeed == "" {
		o.Token = meshToken
	}
	o.TLS, err = TLS("nats", c.CAFile, c.CertFile, c.KeyFile)
	return o, err
}

// TLS is what to call a server of a table with: its authority and a certificate of ours, where they are named. Nil: neither is.
func TLS(table, ca, cert, key string) (*tls.Config, error) {
	if ca == "" && cert == "" {
		return nil, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("%s.ca_file: %w", table, err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s.ca_file: %s holds no PEM certificate", table, ca)
		}
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("%s.cert_file: %w", table, err)
		}
		t.Certificates = []tls.Certificate{pair}
	}
	return t, nil
}
