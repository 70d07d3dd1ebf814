package client

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/exit"
)

// TLSFor returns the TLS configuration for an address; nil is plain text. It uses the given files,
// else plain text on loopback or if private is true, else the system's certificate authorities.
func TLSFor(address string, files cert.Files, private bool) (*tls.Config, error) {
	if files.CA == "" && files.Cert == "" && (private || loopback(address)) {
		return nil, nil
	}
	if (files.Cert == "") != (files.Key == "") {
		return nil, exit.New(exit.Usage, "set both --cert-file and --key-file", "a certificate requires its key")
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

// bearer adds the token to each call.
type bearer string

// GetRequestMetadata returns the headers of a call.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	if b == "" {
		return nil, nil
	}
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity is false: on loopback the token is sent in plain text.
func (b bearer) RequireTransportSecurity() bool { return false }

// readToken reads a token file, which must not be readable by other users.
func readToken(path string) (string, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", exit.New(exit.NoInput, "set the token of the server with --token-file", "the token file %s does not exist", path)
	}
	if err == nil && info.Mode().Perm()&0o077 != 0 {
		return "", exit.New(exit.NoInput, "make it private: `chmod 600 "+path+"`", "other users can read the token file %s", path)
	}
	var data []byte
	if err == nil {
		data, err = os.ReadFile(path)
	}
	if err != nil {
		return "", exit.New(exit.NoInput, "check its permissions", "cannot read the token file: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
