package servertest

import (
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/cert"
)

// CA is a certificate authority of one test.
type CA struct {
	File   string // PEM
	folder cert.Folder
}

// NewCA makes an authority.
func NewCA(t testing.TB) *CA {
	t.Helper()
	f := cert.Folder{Path: t.TempDir(), Now: time.Now}
	if _, err := f.Init("test authority", time.Hour); err != nil {
		t.Fatal(err)
	}
	return &CA{File: f.CAFile(), folder: f}
}

// Issue makes a certificate for loopback, for servers and clients, and gives the PEM files of it
// and of its key.
func (ca *CA) Issue(t testing.TB, name string) (certFile, keyFile string) {
	t.Helper()
	id := cert.Identity{Kind: cert.Service, Name: name}
	if _, err := ca.folder.Issue(id, []string{"localhost", "127.0.0.1"}, time.Hour/2); err != nil {
		t.Fatal(err)
	}
	return ca.folder.CertFile(id), ca.folder.KeyFile(id)
}

// Client is a client with a certificate of the authority, which trusts the authority.
func (ca *CA) Client(t testing.TB) *cert.Source {
	t.Helper()
	certFile, keyFile := ca.Issue(t, "client")
	return open(t, cert.Files{Cert: certFile, Key: keyFile, CA: ca.File})
}

// Person is a client with a person's certificate.
func (ca *CA) Person(t testing.TB, name string) *cert.Source {
	t.Helper()
	id := cert.Identity{Kind: cert.Person, Name: name}
	if _, err := ca.folder.Issue(id, nil, time.Hour/2); err != nil {
		t.Fatal(err)
	}
	return open(t, cert.Files{Cert: ca.folder.CertFile(id), Key: ca.folder.KeyFile(id), CA: ca.File})
}

// Anonymous is a client without a certificate, which trusts the authority.
func (ca *CA) Anonymous(t testing.TB) *cert.Source {
	t.Helper()
	return open(t, cert.Files{CA: ca.File})
}

func open(t testing.TB, files cert.Files) *cert.Source {
	t.Helper()
	s, err := cert.Open(files, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
