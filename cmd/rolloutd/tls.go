package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"

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
	t, err := peerTLS("tls", c.CAFile, "", "")
	if t == nil && err == nil {
		t = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	return t, err
}

// peerTLS is what to call a server of a table with: its authority and a certificate of ours, where they are named. Nil: neither is.
func peerTLS(table, ca, cert, key string) (*tls.Config, error) {
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
