package bus_test

import (
	"errors"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/bus/bustest"
	"github.com/rollout-rl/rollout/libs/servertest"
)

const (
	token = "s3cret"
	run   = "run-01jz0000000000000000000000"
)

func start(t *testing.T, dir string, port int) *bus.Embedded {
	t.Helper()
	srv, err := bus.StartEmbedded(dir, bus.EmbeddedOptions{Token: token, NoSync: true, Port: port})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	return srv
}

func TestEmbedded(t *testing.T) {
	t.Parallel()
	bustest.Run(t, bus.Options{URL: start(t, t.TempDir(), 0).URL(), Token: token})
}

func TestEmbeddedMutualTLS(t *testing.T) {
	t.Parallel()
	ca := servertest.NewCA(t)
	srv, err := bus.StartEmbedded(t.TempDir(), bus.EmbeddedOptions{Token: token, NoSync: true, TLS: ca.Client(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	if !strings.HasPrefix(srv.URL(), "tls://127.0.0.1:") {
		t.Errorf("url %s", srv.URL())
	}
	bustest.Run(t, bus.Options{URL: srv.URL(), Token: token, TLS: ca.Client(t)})
	for name, o := range map[string]bus.Options{
		"a person's certificate": {URL: srv.URL(), TLS: ca.Person(t, "ada")},
		"no certificate":         {URL: srv.URL(), TLS: ca.Anonymous(t)}, "of another authority": {URL: srv.URL(), TLS: servertest.NewCA(t).Client(t)},
		"the system's authorities": {URL: srv.URL()}, "plain text": {URL: strings.Replace(srv.URL(), "tls://", "nats://", 1)},
	} {
		o.Token = token
		if _, err := bus.Connect(t.Context(), o); !errors.Is(err, bus.ErrTLS) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A server that stops and starts again with the same folder and port still has the messages that it
// acked.
func TestEmbeddedRestart(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "nats")
	srv := start(t, dir, 0)
	_, p, _ := net.SplitHostPort(strings.TrimPrefix(srv.URL(), "nats://"))
	port, err := strconv.Atoi(p)
	if err != nil {
		t.Fatal(err)
	}
	bustest.RunCrash(t, bustest.Crashable{
		Options: bus.Options{URL: srv.URL(), Token: token}, Kill: func(string) { srv.Stop() }, Start: func() { start(t, dir, port) },
	})
}

func TestListensOnLoopback(t *testing.T) {
	t.Parallel()
	srv := start(t, t.TempDir(), 0)
	if !strings.HasPrefix(srv.URL(), "nats://127.0.0.1:") {
		t.Errorf("url %s", srv.URL())
	}
}
