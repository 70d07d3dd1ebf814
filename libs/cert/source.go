package cert

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"
)

// Files are PEM files of a process.
type Files struct {
	Cert string // the own certificate; "": none, for clients
	Key  string // only readable by the owner
	CA   string // the trusted authorities; "": the system's, and clients need no certificate
}

// Source has the certificate of a process and the authorities that it trusts. Both are read again
// when their files change. New connections use the new files; existing connections continue. If the
// files do not match, for example between the two writes of a renewal, the previous ones stay in
// use. Its methods may be called from many goroutines.
type Source struct {
	files Files
	log   *slog.Logger

	mu     sync.Mutex
	stamps [3]stamp
	pair   tls.Certificate
	roots  *x509.CertPool // nil: the system's
	failed string         // the last failure to reload, logged once
}

// stamp reports whether a file was written again.
type stamp struct {
	size    int64
	changed time.Time
}

// Open reads the files. A key that others may read is refused. log may be nil. ErrFile.
func Open(files Files, log *slog.Logger) (*Source, error) {
	s := &Source{files: files, log: log}
	stamps, err := s.look()
	if err != nil {
		return nil, err
	}
	if err := s.read(); err != nil {
		return nil, err
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.stamps = stamps
	return s, nil
}

// Mutual reports whether both sides show certificates. Who names authorities and has no certificate
// only calls.
func (s *Source) Mutual() bool { return s.files.CA != "" && s.files.Cert != "" }

// Files returns the paths of the files.
func (s *Source) Files() Files { return s.files }

// Server returns the configuration of a listener for these protocols ("h2", "http/1.1"; none for
// other protocols). It stays valid after renewals, because each handshake uses the current
// certificate. If authorities are named, a client without a certificate of theirs is refused.
func (s *Source) Server(protocols ...string) *tls.Config { return s.server(s.Mutual(), protocols) }

// Mesh is like Server, but refuses certificates of people, for services that only services and
// workers call.
func (s *Source) Mesh() *tls.Config {
	made := s.Server()
	each := made.GetConfigForClient
	made.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		c, err := each(hello)
		if err == nil {
			c.VerifyConnection = noPerson
		}
		return c, err
	}
	return made
}

func noPerson(state tls.ConnectionState) error {
	if len(state.PeerCertificates) == 0 {
		return nil
	}
	if id, known := Of(state.PeerCertificates[0]); known && id.Kind == Person {
		return ErrPerson.WithMessage("the certificate of the person %s was shown to what services and workers alone call", id.Name)
	}
	return nil
}

// Public is a Server that asks clients for no certificate.
func (s *Source) Public(protocols ...string) *tls.Config { return s.server(false, protocols) }

func (s *Source) server(mutual bool, protocols []string) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: protocols, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		pair, roots := s.current()
		c := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: protocols, Certificates: []tls.Certificate{pair}}
		if mutual {
			c.ClientAuth, c.ClientCAs = tls.RequireAndVerifyClientCert, roots
		}
		return c, nil
	}}
}

// Client returns the configuration of one connection; call it for each connection.
func (s *Source) Client() *tls.Config {
	pair, roots := s.current()
	c := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}
	// Check here what the server would refuse, because its message may be lost with the connection.
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		switch leaf := pair.Leaf; {
		case pair.Certificate == nil:
			return nil, ErrRequired
		case leaf != nil && time.Now().After(leaf.NotAfter):
			return nil, ErrOursEnded
		}
		return &pair, nil
	}
	return c
}

// Pair is the certificate of now, empty where none is named.
func (s *Source) Pair() tls.Certificate {
	pair, _ := s.current()
	return pair
}

// Roots is the authorities of now; nil: the system's.
func (s *Source) Roots() *x509.CertPool {
	_, roots := s.current()
	return roots
}

// Dial connects to a server and completes the handshake. It has the signature of http.Transport's
// DialTLSContext.
func (s *Source) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return (&tls.Dialer{Config: s.Client()}).DialContext(ctx, network, address)
}

// current reads the files again where they have changed.
func (s *Source) current() (tls.Certificate, *x509.CertPool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stamps, err := s.look()
	if err == nil && stamps == s.stamps {
		return s.pair, s.roots
	}
	if err == nil {
		err = s.read()
	}
	if err != nil {
		if text := err.Error(); text != s.failed {
			s.failed = text
			s.log.Warn("renewed certificates can't be read; those of before stay in use", "error", text)
		}
		return s.pair, s.roots
	}
	s.stamps, s.failed = stamps, ""
	s.log.Info("certificates were renewed", "file", s.files.Cert, "authority", s.files.CA)
	return s.pair, s.roots
}

func (s *Source) look() (out [3]stamp, err error) {
	for i, path := range []string{s.files.Cert, s.files.Key, s.files.CA} {
		if path == "" {
			continue
		}
		info, err := os.Stat(path)
		if err != nil {
			return out, ErrFile.WithMessage("%v", err)
		}
		out[i] = stamp{info.Size(), info.ModTime()}
	}
	return out, nil
}

func (s *Source) read() error {
	var pair tls.Certificate
	if s.files.Cert != "" {
		if err := private(s.files.Key); err != nil {
			return err
		}
		var err error
		if pair, err = tls.LoadX509KeyPair(s.files.Cert, s.files.Key); err != nil {
			return ErrFile.WithMessage("%s with %s: %v", s.files.Cert, s.files.Key, err)
		}
	}
	var roots *x509.CertPool
	if s.files.CA != "" {
		list, err := Read(s.files.CA)
		if err != nil {
			return ErrFile.WithMessage("%v", err)
		}
		roots = x509.NewCertPool()
		for _, c := range list {
			roots.AddCert(c)
		}
	}
	s.pair, s.roots = pair, roots
	return nil
}

// private refuses a key that others may read.
func private(path string) error {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return ErrMissing.WithMessage("the key %s is not there", path)
	}
	if err != nil {
		return fmt.Errorf("read key: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return ErrFile.WithMessage("others may read the key %s", path).Fix("chmod 600 " + path)
	}
	return nil
}
