package main

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/config"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// openCertificates opens the certificate and the authority of this process; nil if neither is
// configured. An expired certificate is an error.
func openCertificates(c config.TLS, log *slog.Logger) (*cert.Source, error) {
	if c.CertFile == "" && c.CAFile == "" {
		return nil, nil
	}
	files := cert.Files{Cert: c.CertFile, Key: c.KeyFile, CA: c.CAFile}
	s, err := cert.Open(files, log)
	if err != nil {
		return nil, fmt.Errorf("[tls]: %w", err)
	}
	return s, nil
}

// serves returns the certificates for the gRPC listener; nil if there is only an authority.
func serves(s *cert.Source) *cert.Source {
	if s == nil || s.Files().Cert == "" {
		return nil
	}
	return s
}

// mutual returns the certificates for the embedded servers and their clients, which use mutual TLS
// or none.
func mutual(s *cert.Source) *cert.Source {
	if serves(s) == nil || !s.Mutual() {
		return nil
	}
	return s
}

// secureHTTP serves HTTP, over TLS if there is a certificate.
func secureHTTP(srv *http.Server, lis net.Listener, s *cert.Source) error {
	if s == nil {
		return srv.Serve(lis)
	}
	srv.TLSConfig = s.Server("h2", "http/1.1")
	return srv.ServeTLS(lis, "", "")
}

// encrypted reports whether the address of a server requires TLS.
func encrypted(address string) bool {
	return strings.HasPrefix(address, "tls://") || strings.HasPrefix(address, "https://")
}

// workerTLS returns the certificates of workers; nil: plain text.
func workerTLS(c config.TLS) *runv1.WorkerTls {
	if !c.Mutual() {
		return nil
	}
	certFile, keyFile := c.Worker()
	return &runv1.WorkerTls{CaFile: c.CAFile, CertFile: certFile, KeyFile: keyFile}
}

// gatewayTLS returns the certificates of the gateway. On loopback it uses plain text, which OpenAI
// clients use without configuration.
func gatewayTLS(address string, s *cert.Source) *cert.Source {
	if config.Loopback(address) {
		return nil
	}
	return serves(s)
}
