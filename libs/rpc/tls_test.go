package rpc_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/discovery/registry"
	"github.com/rollout-rl/rollout/libs/rpc"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// certificate is one for the host name localhost, and the configuration of a client that trusts it.
func certificate(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12},
		&tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
}

// With TLS, calls in memory stay without it, and calls by discovery check the certificate against the instance's host.
func TestTLS(t *testing.T) {
	t.Parallel()
	server, client := certificate(t)
	b := setup(t, &events{list: ok}, rpc.ServerOptions{TLS: server})
	r := registry.New("")
	agent := httptest.NewServer(r.Handler())
	t.Cleanup(func() { r.Close(); agent.CloseClientConnections(); agent.Close() })
	lookup, err := discovery.NewClient(discovery.Options{Address: agent.URL})
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := strings.Cut(b.address, ":")
	if _, err := lookup.Register(t.Context(), discovery.Service{Name: "storage", ID: "s", Address: "localhost", Port: atoi(t, port)}); err != nil {
		t.Fatal(err)
	}
	call := func(d *rpc.Dialer, options ...grpc.CallOption) error {
		t.Cleanup(func() { _ = d.Close() })
		conn, err := d.Conn("storage")
		if err != nil {
			t.Fatal(err)
		}
		_, err = storagev1.NewEventServiceClient(conn).ListEvents(t.Context(), &storagev1.ListEventsRequest{}, options...)
		return err
	}
	if err := call(rpc.NewDialer(rpc.DialerOptions{Lookup: lookup.Resolver(), Token: token, TLS: client})); err != nil {
		t.Errorf("over TLS: %v", err)
	}
	if err := call(rpc.NewDialer(rpc.DialerOptions{Local: b.server, Hosted: []string{"storage"}, Token: token, TLS: client})); err != nil {
		t.Errorf("in memory: %v", err)
	}
	stranger := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	for name, o := range map[string]rpc.DialerOptions{
		"plain text": {Lookup: lookup.Resolver(), Token: token}, "an unknown authority": {Lookup: lookup.Resolver(), Token: token, TLS: stranger},
	} {
		if err := call(rpc.NewDialer(o), grpc.WaitForReady(false)); err == nil {
			t.Errorf("%s passes", name)
		}
	}
}

func atoi(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
