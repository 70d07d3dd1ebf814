// Package backend connects to the servers that rolloutd.toml names, for rolloutd and for the doctor.
package backend

import (
	"fmt"
	"log/slog"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/config"
)

// NATS reads the credentials that the configuration names. Without any the mesh token is one. URL and Log are the caller's.
func NATS(c config.NATS, meshToken string, environ []string) (o bus.Options, err error) {
	o.User, o.Replicas = c.User, c.Replicas
	if o.Token, err = c.Token.Read("nats.token", environ); err != nil {
		return o, err
	}
	if o.Password, err = c.Password.Read("nats.password", environ); err != nil {
		return o, err
	}
	if o.NKeySeed, err = c.NKey.Read("nats.nkey", environ); err != nil {
		return o, err
	}
	if o.Token+o.User+o.NKeySeed == "" {
		o.Token = meshToken
	}
	o.TLS, err = TLS("nats", c.CAFile, c.CertFile, c.KeyFile, o.Log)
	return o, err
}

// TLS is what to call a server of a table with: its authority and a certificate of ours, where they are named. Nil: neither is.
// Files that are renewed are read again.
func TLS(table, ca, certificate, key string, log *slog.Logger) (*cert.Source, error) {
	if ca == "" && certificate == "" {
		return nil, nil
	}
	s, err := cert.Open(cert.Files{Cert: certificate, Key: key, CA: ca}, log)
	if err != nil {
		return nil, fmt.Errorf("[%s]: %w", table, err)
	}
	return s, nil
}
