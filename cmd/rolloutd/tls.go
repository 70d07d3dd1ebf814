package main

import (
	"crypto/tls"
	"fmt"

	"github.com/rollout-rl/rollout/cmd/internal/backend"
	"github.com/rollout-rl/rollout/libs/config"
)

// loadServerTLS is nil where no certificate is configured.
func loadServerTLS(c config.TLS) (*tls.Config, error) {
	if c.CertFile == "" {
		return nil, nil
	}
	cert, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("load the TLS certificate: %w", err)
	}
	return &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}}, nil
}

// clientTLS is nil where peers are called in plain text. Without an authority of its own the system's are trusted.
func clientTLS(c config.TLS) (*tls.Config, error) {
	if c.CertFile == "" && c.CAFile == "" {
		return nil, nil
	}
	t, err := backend.TLS("tls", c.CAFile, "", "")
	if t == nil && err == nil {
		t = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	return t, err
}
