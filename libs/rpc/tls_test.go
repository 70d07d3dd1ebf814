package rpc_test

import (
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/discovery/registry"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/servertest"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// With mutual TLS, calls in memory stay without it, and calls by discovery check the certificate
// against the instance's host.
func TestTLS(t *testing.T) {
	t.Parallel()
	ca := servertest.NewCA(t)
	client := ca.Client(t)
	b := setup(t, &events{list: ok}, rpc.ServerOptions{TLS: client})
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
	for says, o := range map[string]*cert.Source{
		"": nil, "of no authority that is trusted here": servertest.NewCA(t).Client(t), "requires a certificate": ca.Anonymous(t),
	} {
		err := call(rpc.NewDialer(rpc.DialerOptions{Lookup: lookup.Resolver(), Token: token, TLS: o}), grpc.WaitForReady(false))
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: %v", o, err)
		}
	}
	if n := strings.Count(b.log.String(), "no TLS connection with a client"); n == 0 || n > 4 { // each reason once, however often a client tries
		t.Errorf("%d in the log:\n%s", n, b.log)
	}
}

// A process that trusts authorities but has no certificate calls a worker on its host in plain
// text, because the worker has no certificate either.
func TestLocalWorkerOfWhoOnlyCalls(t *testing.T) {
	t.Parallel()
	ca := servertest.NewCA(t)
	b := setup(t, &events{list: ok}, rpc.ServerOptions{})
	for what, answered := range map[*cert.Source]bool{ca.Anonymous(t): true, ca.Client(t): false} {
		conn, err := rpc.NewDialer(rpc.DialerOptions{Token: token, TLS: what}).Dial(b.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, err = storagev1.NewEventServiceClient(conn).ListEvents(t.Context(), &storagev1.ListEventsRequest{})
		if (err == nil) != answered {
			t.Errorf("mutual %v: %v", what.Mutual(), err)
		}
	}
}

// A running server and client use renewed certificates, and expired ones are refused with a fix.
func TestRenewedCertificates(t *testing.T) {
	t.Parallel()
	now := time.Now()
	f := cert.Folder{Path: t.TempDir(), Now: func() time.Time { return now }}
	if _, err := f.Init("test", time.Hour); err != nil {
		t.Fatal(err)
	}
	issue := func(id cert.Identity, hosts ...string) cert.Files {
		if _, err := f.Issue(id, hosts, time.Hour/2); err != nil {
			t.Fatal(err)
		}
		return cert.Files{Cert: f.CertFile(id), Key: f.KeyFile(id), CA: f.CAFile()}
	}
	open := func(files cert.Files) *cert.Source {
		s, err := cert.Open(files, nil)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	client := cert.Identity{Kind: cert.Worker, Name: "w"}
	b := setup(t, &events{list: ok}, rpc.ServerOptions{TLS: open(issue(cert.Identity{Kind: cert.Service, Name: "s"}, "127.0.0.1"))})
	now = now.Add(-45 * time.Minute)
	d := rpc.NewDialer(rpc.DialerOptions{Token: token, TLS: open(issue(client, "127.0.0.1"))})
	call := func() error {
		conn, err := d.Dial(b.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, err = storagev1.NewEventServiceClient(conn).ListEvents(t.Context(), &storagev1.ListEventsRequest{})
		return err
	}
	if err := cert.Explain(call()); rpcerr.Reason(err) != "CERT_EXPIRED" || rpcerr.Fix(err) == "" {
		t.Errorf("before the renewal: %v", err)
	}
	now = time.Now()
	if _, err := f.Renew(client, time.Hour/2); err != nil {
		t.Fatal(err)
	}
	if err := call(); err != nil {
		t.Errorf("after it: %v", err)
	}
	// People have keys: the mesh token is not for them.
	d = rpc.NewDialer(rpc.DialerOptions{Token: token, TLS: open(issue(cert.Identity{Kind: cert.Person, Name: "ada"}))})
	if err := call(); rpcerr.Code(err) != codes.Unauthenticated || !strings.Contains(rpcerr.Fix(err), "ROLLOUT_API_KEY") {
		t.Errorf("of a person: %v", err)
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
