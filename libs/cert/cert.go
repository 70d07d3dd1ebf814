// Package cert has the certificates of processes and people for mutual TLS: an authority that
// issues them (Folder), and the files of a running process, which are read again after a renewal
// (Source).
//
// A certificate names its owner in a URI: rollout://mesh/service/NAME, rollout://mesh/worker/NAME,
// or rollout://mesh/person/NAME. Certificates of another authority may have no such URI; then they
// only prove that the authority issued them.
package cert

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Errors, compared with errors.Is.
var (
	ErrMissing = rpcerr.New(codes.NotFound, "CERT_MISSING", "there is no such certificate")
	ErrExists  = rpcerr.New(codes.AlreadyExists, "CERT_EXISTS", "there is one already")
	ErrFile    = rpcerr.New(codes.FailedPrecondition, "CERT_FILE", "the certificate or its key can't be used").
			Fix("name existing PEM files that belong together; `rollout certs show` lists those that `rollout certs` made")
	ErrName    = rpcerr.New(codes.InvalidArgument, "CERT_NAME", "a certificate can't be made for that")
	ErrExpired = rpcerr.New(codes.FailedPrecondition, "CERT_EXPIRED", "the certificate has ended")
)

// Kind is the kind of a certificate's owner.
type Kind string

// The kinds of certificates. The certificate of a person is for clients only.
const (
	Service Kind = "service"
	Worker  Kind = "worker"
	Person  Kind = "person"
)

// Kinds is all of them.
func Kinds() []Kind { return []Kind{Service, Worker, Person} }

const (
	uriScheme = "rollout"
	uriHost   = "mesh"
)

var name = regexp.MustCompile(`^[a-z0-9]([a-z0-9.@_-]{0,62}[a-z0-9])?$`)

// Identity is whose certificate it is.
type Identity struct {
	Kind Kind
	Name string // of a service, a host or a person; a-z, 0-9, and . @ _ - between
}

// String is KIND-NAME, as files are named.
func (id Identity) String() string { return string(id.Kind) + "-" + id.Name }

func (id Identity) check() error {
	if !slices.Contains(Kinds(), id.Kind) {
		return ErrName.WithMessage("%q is not a kind of certificate", id.Kind).Fix("choose service, worker or person")
	}
	if !name.MatchString(id.Name) {
		return ErrName.WithMessage("%q is not a valid name", id.Name).Fix("use at most 64 of a-z, 0-9, and . @ _ - between")
	}
	return nil
}

// Of returns the owner of a certificate; false if the certificate does not name one.
func Of(c *x509.Certificate) (Identity, bool) {
	for _, u := range c.URIs {
		kind, name, ok := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
		if id := (Identity{Kind(kind), name}); ok && u.Scheme == uriScheme && u.Host == uriHost && id.check() == nil {
			return id, true
		}
	}
	return Identity{}, false
}

// Read reads the certificates of a PEM file, the leaf first.
func Read(path string) ([]*x509.Certificate, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read certificate: %w", err)
	}
	var out []*x509.Certificate
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, ErrFile.WithMessage("%s: %v", path, err)
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, ErrFile.WithMessage("%s holds no certificate in PEM", path)
	}
	return out, nil
}
