package client

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/netip"
	"os"

	"github.com/rollout-rl/rollout/cmd/internal/exit"
)

// TLSFor is how an address is called: in plain text on loopback, and elsewhere only where the user says that the network is
// private; else by TLS, checked against the authority of a PEM file or the system's own.
func TLSFor(address, caFile string, private bool) (*tls.Config, error) {
	if caFile == "" && (private || loopback(address)) {
		return nil, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if caFile == "" {
		return config, nil
	}
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, exit.New(exit.NoInput, "correct the path", "can't read the authority: %w", err)
	}
	config.RootCAs = x509.NewCertPool()
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, exit.New(exit.NoInput, "name a file with certificates in PEM", "%s holds no certificate", caFile)
	}
	return config, nil
}

func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}
