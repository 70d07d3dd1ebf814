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

// openCertificates is the certificate of this process and whom it trusts; nil where neither is configured. It is refused where it has
// ended already: nobody would talk to this process.
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

// serves is what the gRPC listener uses: nothing where this process only calls.
func serves(s *cert.Source) *cert.Source {
	if s == nil || s.Files().Cert == "" {
		return nil
	}
	return s
}

// mutual is what the mesh's own servers use, and what calls them: TLS of both sides or none.
func mutual(s *cert.Source) *cert.Source {
	if serves(s) == nil || !s.Mutual() {
		return nil
	}
	return s
}

// secureHTTP serves HTTP over TLS where there is a certificate.
func secureHTTP(srv *http.Server, lis net.Listener, s *cert.Source) error {
	if s == nil {
		return srv.Serve(lis)
	}
	srv.TLSConfig = s.Server("h2", "http/1.1")
	return srv.ServeTLS(lis, "", "")
}

// encrypted reports whether an address of a server asks for TLS.
func encrypted(address string) bool {
	return strings.HasPrefix(address, "tls://") || strings.HasPrefix(address, "https://")
}

// workerTLS is what workers show and whom they trust; nil: they speak plain text.
func workerTLS(c config.TLS) *runv1.WorkerTls {
	if !c.Mutual() {
		return nil
	}
	certFile, keyFile := c.Worker()
	return &runv1.WorkerTls{CaFile: c.CAFile, CertFile: certFile, KeyFile: keyFile}
}

// gatewayTLS is what a gateway that others reach is served with. One on loopback stays as OpenAI's clients find it simplest.
func gatewayTLS(address string, s *cert.Source) *cert.Source {
	if config.Loopback(address) {
		return nil
	}
	return serves(s)
}
