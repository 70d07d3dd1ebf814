package cert_test

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

const day = 24 * time.Hour

var (
	loopback = []string{"localhost", "127.0.0.1"}
	mesh     = cert.Identity{Kind: cert.Service, Name: "mesh"}
	ada      = cert.Identity{Kind: cert.Person, Name: "ada@example.org"}
)

func folder(t *testing.T, now func() time.Time) cert.Folder {
	t.Helper()
	f := cert.Folder{Path: filepath.Join(t.TempDir(), "certs"), Now: now}
	if _, err := f.Init("test", 3650*day); err != nil {
		t.Fatal(err)
	}
	return f
}

func issue(t *testing.T, f cert.Folder, id cert.Identity, life time.Duration) cert.Files {
	t.Helper()
	hosts := loopback
	if id.Kind == cert.Person {
		hosts = nil
	}
	if _, err := f.Issue(id, hosts, life); err != nil {
		t.Fatal(err)
	}
	return cert.Files{Cert: f.CertFile(id), Key: f.KeyFile(id), CA: f.CAFile()}
}

func source(t *testing.T, files cert.Files) *cert.Source {
	t.Helper()
	s, err := cert.Open(files, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestFolder(t *testing.T) {
	t.Parallel()
	f := folder(t, time.Now)
	for _, id := range []cert.Identity{mesh, ada, {Kind: cert.Worker, Name: "gpu-0"}} {
		files := issue(t, f, id, 30*day)
		leaf, err := cert.Check(files, time.Now())
		if err != nil {
			t.Errorf("%s: %v", id, err)
		}
		if got, ok := cert.Of(leaf); !ok || got != id {
			t.Errorf("%s became %v", id, got)
		}
		if _, err := cert.Check(files, time.Now().Add(31*day)); !errors.Is(err, cert.ErrExpired) || rpcerr.Fix(err) == "" {
			t.Errorf("%s after its end: %v", id, err)
		}
		if info, err := os.Stat(files.Key); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("the key of %s: %v %v", id, info.Mode(), err)
		}
	}
	issued, err := f.Issued()
	if err != nil || len(issued) != 3 || !slices.Contains(issued, ada) {
		t.Errorf("issued: %v %v", issued, err)
	}
	if info, err := os.Stat(f.CAKeyFile()); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the authority's key: %v %v", info.Mode(), err)
	}

	before, _ := cert.Read(f.CertFile(mesh))
	after, err := f.Renew(mesh, 30*day)
	if err != nil || after.SerialNumber.Cmp(before[0].SerialNumber) == 0 || !slices.Equal(cert.Hosts(after), loopback) {
		t.Errorf("renewed: %v %v", after, err)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	f := folder(t, time.Now)
	files := issue(t, f, mesh, day)
	other := issue(t, folder(t, time.Now), mesh, day)
	_, again := f.Init("test", day)
	_, unknown := f.Renew(cert.Identity{Kind: cert.Worker, Name: "none"}, day)
	_, kind := f.Issue(cert.Identity{Kind: "robot", Name: "x"}, loopback, day)
	_, bad := f.Issue(cert.Identity{Kind: cert.Service, Name: "../x"}, loopback, day)
	_, hosts := f.Issue(mesh, nil, day)
	_, port := f.Issue(mesh, []string{"h:1"}, day)
	_, served := f.Issue(ada, loopback, day)
	_, long := f.Issue(mesh, loopback, 4000*day)
	_, withoutAuthority := cert.Folder{Path: t.TempDir(), Now: time.Now}.Issue(mesh, loopback, day)
	_, chain := cert.Check(cert.Files{Cert: files.Cert, Key: files.Key, CA: other.CA}, time.Now())
	_, key := cert.Check(cert.Files{Cert: files.Cert, Key: other.Key, CA: files.CA}, time.Now())
	if err := os.Chmod(other.Key, 0o644); err != nil {
		t.Fatal(err)
	}
	_, public := cert.Check(other, time.Now())
	_, open := cert.Open(other, nil)
	for name, c := range map[string]struct {
		got, want error
		says      string
	}{
		"a second authority": {again, cert.ErrExists, "there already"}, "renew what is not there": {unknown, cert.ErrMissing, "worker-none"},
		"kind": {kind, cert.ErrName, "robot"}, "name": {bad, cert.ErrName, "../x"}, "no hosts": {hosts, cert.ErrName, "hosts"},
		"a port": {port, cert.ErrName, "h:1"}, "a person with hosts": {served, cert.ErrName, "person"},
		"longer than the authority": {long, cert.ErrExpired, "authority ends"}, "no authority": {withoutAuthority, cert.ErrMissing, "no authority"},
		"another authority": {chain, cert.ErrFile, "does not lead"}, "another key": {key, cert.ErrFile, "not the key"},
		"a public key": {public, cert.ErrFile, "others may read"}, "a public key in use": {open, cert.ErrFile, "others may read"},
	} {
		if !errors.Is(c.got, c.want) || !strings.Contains(c.got.Error(), c.says) {
			t.Errorf("%s: %v", name, c.got)
		}
	}
}

// shake connects a client to a server that sends one byte, and returns the result for the client.
func shake(t *testing.T, server, client *tls.Config) (serial string, err error) {
	t.Helper()
	listener, err := tls.Listen("tcp", "127.0.0.1:0", server)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = conn.Write([]byte{1})
		_, _ = conn.Read(make([]byte, 1))
	}()
	defer func() { listener.Close(); <-done }()
	conn, err := tls.Dial("tcp", listener.Addr().String(), client)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_, err = io.ReadFull(conn, make([]byte, 1)) // the server refuses our certificate after the handshake
	return conn.ConnectionState().PeerCertificates[0].SerialNumber.String(), err
}

func TestHandshake(t *testing.T) {
	t.Parallel()
	f, other := folder(t, time.Now), folder(t, time.Now)
	past := cert.Folder{Path: f.Path, Now: func() time.Time { return time.Now().Add(-day) }}
	server := source(t, issue(t, f, mesh, day)).Server()
	good := source(t, issue(t, f, ada, day)).Client()
	ended := source(t, issue(t, past, cert.Identity{Kind: cert.Person, Name: "late"}, time.Hour)).Client()
	unknownPeer := source(t, issue(t, other, ada, day)).Client()
	unknownPeerThatTrusts := unknownPeer.Clone()
	unknownPeerThatTrusts.RootCAs = good.RootCAs
	none := &tls.Config{RootCAs: good.RootCAs, MinVersion: tls.VersionTLS12}
	elsewhere := good.Clone()
	elsewhere.ServerName = "other.internal"
	endedServer := source(t, issue(t, past, cert.Identity{Kind: cert.Service, Name: "late"}, time.Hour)).Server()
	for name, c := range map[string]struct {
		server, client *tls.Config
		want           error
	}{
		"both know each other": {server, good, nil},
		"no certificate":       {server, none, cert.ErrRequired},
		"ended":                {server, ended, cert.ErrOursEnded},
		"of another authority": {server, unknownPeerThatTrusts, cert.ErrOurs},
		"trusts another":       {server, unknownPeer, cert.ErrTheirs},
		"another host":         {server, elsewhere, cert.ErrHost},
		"the server's ended":   {endedServer, good, cert.ErrTheirsEnded},
	} {
		_, err := shake(t, c.server, c.client)
		if err = cert.Explain(err); !errors.Is(err, c.want) || err != nil && rpcerr.Fix(err) == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRenewedFilesAreTaken(t *testing.T) {
	t.Parallel()
	f := folder(t, time.Now)
	var log bytes.Buffer
	files := issue(t, f, mesh, day)
	s, err := cert.Open(files, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	server, client := s.Server(), source(t, issue(t, f, ada, day))
	first, err := shake(t, server, client.Client())
	if err != nil {
		t.Fatal(err)
	}
	same, _ := shake(t, server, client.Client())
	renewed, err := f.Renew(mesh, 2*day)
	if err != nil {
		t.Fatal(err)
	}
	second, err := shake(t, server, client.Client())
	if err != nil || same != first || second != renewed.SerialNumber.String() {
		t.Errorf("serials %s, %s, then %s, %v", first, same, second, err)
	}
	// Half of a renewal: a key that does not fit.
	key, _ := os.ReadFile(issue(t, f, ada, day).Key)
	if err := os.WriteFile(files.Key, key, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if third, err := shake(t, server, client.Client()); err != nil || third != second {
			t.Errorf("with half of a renewal: %s %v", third, err)
		}
	}
	if n := strings.Count(log.String(), "can't be read"); n != 1 {
		t.Errorf("logged %d times: %s", n, log.String())
	}
	if _, err := f.Renew(mesh, 2*day); err != nil {
		t.Fatal(err)
	}
	if last, err := shake(t, server, client.Client()); err != nil || last == second {
		t.Errorf("after the other half: %s %v", last, err)
	}
}

func TestPlainText(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		if conn, err := listener.Accept(); err == nil {
			_, _ = conn.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
			conn.Close()
		}
	}()
	_, err = tls.Dial("tcp", listener.Addr().String(), source(t, issue(t, folder(t, time.Now), ada, day)).Client())
	if !errors.Is(cert.Explain(err), cert.ErrNoTLS) {
		t.Error(err)
	}
}
