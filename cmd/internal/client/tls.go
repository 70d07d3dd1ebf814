package client

import (
	"cmp"
	"crypto/tls"
	"net"
	"net/netip"
	"strings"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/exit"
)

// TLSFor is how an address is called: with the files that are named, else in plain text on loopback, and elsewhere only where the user
// says that the network is private; else by TLS, checked against the system's authorities.
func TLSFor(address string, files cert.Files, private bool) (*tls.Config, error) {
	if files.CA == "" && files.Cert == "" && (private || loopback(address)) {
		return nil, nil
	}
	if (files.Cert == "") != (files.Key == "") {
		return nil, exit.New(exit.Usage, "name both, --cert-file and --key-file", "a certificate and its key go together")
	}
	s, err := cert.Open(files, nil)
	if err != nil {
		e := exit.From(err)
		return nil, &exit.Error{Code: exit.NoInput, Reason: e.Reason, Fix: cmp.Or(e.Fix, "correct the path"), Err: e.Err}
	}
	return s.Client(), nil
}

func loopback(address string) bool {
	if _, rest, found := strings.Cut(address, "://"); found {
		address = rest
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}
