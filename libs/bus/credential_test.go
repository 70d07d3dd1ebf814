package bus_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/proto/gen/names"
)

// A worker's token reaches the subjects of its run: it publishes there, and neither reads nor
// writes what belongs to another run or to services.
func TestAWorkersTokenReachesItsRunOnly(t *testing.T) {
	t.Parallel()
	authority := credential.NewAuthority("mesh", nil)
	server, err := bus.StartEmbedded(t.TempDir(), bus.EmbeddedOptions{Token: "mesh", NoSync: true, Workers: authority})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	issue := func(role string, made time.Time) string {
		return credential.Issue("mesh", credential.For("run-1", role, 1, made))
	}
	for name, token := range map[string]string{"another": "other", "expired": issue("inference", time.Now().Add(-2*credential.Lifetime)), "peer": issue(credential.Peer, time.Now())} {
		if _, err := nats.Connect(server.URL(), nats.Token(token)); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("%s token: %v", name, err)
		}
	}
	refused := make(chan struct{}, 16)
	worker, err := nats.Connect(server.URL(), nats.Token(issue("inference", time.Now())), nats.CustomInboxPrefix("_INBOX_run-1"),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, _ error) { refused <- struct{}{} }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(worker.Close)
	service, err := nats.Connect(server.URL(), nats.Token("mesh"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(service.Close)
	heard, err := service.SubscribeSync(">")
	if err != nil {
		t.Fatal(err)
	}
	if err := service.Flush(); err != nil {
		t.Fatal(err)
	}
	for _, subject := range []string{names.TrajSubject("run-1"), names.RunEventSubject("run-1"), names.IdleSubject("run-1")} {
		if err := errors.Join(worker.Publish(subject, nil), worker.Flush()); err != nil {
			t.Fatal(err)
		}
		if m, err := heard.NextMsg(10 * time.Second); err != nil || m.Subject != subject {
			t.Errorf("%s: %v", subject, err)
		}
	}
	for _, subject := range []string{
		names.TrajSubject("run-2"), names.RunEventSubject("run-2"), names.MeshEvents, names.WorkSubject("run-1") + ".0.0",
		"$JS.API.STREAM.DELETE." + names.WorkStream("run-1"), "$JS.API.CONSUMER.MSG.NEXT." + names.WorkStream("run-2") + ".workers",
	} {
		if err := errors.Join(worker.Publish(subject, nil), worker.Flush()); err != nil {
			t.Fatal(err)
		}
		select {
		case <-refused:
		case <-time.After(10 * time.Second):
			t.Errorf("a worker may publish on %s", subject)
		}
	}
	for _, subject := range []string{">", "_INBOX.>", "_INBOX_run-2.>", names.EventSubjects} {
		if _, err := worker.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
		select {
		case <-refused:
		case <-time.After(10 * time.Second):
			t.Errorf("a worker may listen on %s", subject)
		}
	}
}

// The connection of a worker ends with its credential: a fenced worker that continues reads and
// writes nothing. With a renewed credential a worker connects again by itself.
func TestAConnectionEndsWithItsCredential(t *testing.T) {
	t.Parallel()
	var ahead atomic.Int64
	authority := credential.NewAuthority("mesh", func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) })
	server, err := bus.StartEmbedded(t.TempDir(), bus.EmbeddedOptions{Token: "mesh", NoSync: true, Workers: authority})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	go server.Run(t.Context(), func() bool { return true })
	type connection struct {
		*nats.Conn
		left, back chan struct{}
	}
	connect := func(incarnation uint32) connection {
		c := connection{left: make(chan struct{}, 64), back: make(chan struct{}, 64)}
		token := func() string {
			return credential.Issue("mesh", credential.For("run-1", "inference", incarnation, time.Now().Add(time.Duration(ahead.Load()))))
		}
		var err error
		c.Conn, err = nats.Connect(server.URL(), nats.TokenHandler(token), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond), nats.IgnoreAuthErrorAbort(),
			nats.DisconnectErrHandler(func(*nats.Conn, error) { c.left <- struct{}{} }), nats.ReconnectHandler(func(*nats.Conn) { c.back <- struct{}{} }))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		return c
	}
	await := func(what string, happened chan struct{}) {
		t.Helper()
		select {
		case <-happened:
		case <-time.After(30 * time.Second):
			t.Fatal(what)
		}
	}
	renewed := connect(2)
	ahead.Store(int64(2 * credential.Lifetime)) // of the clock of the server; the worker has a renewed credential
	await("the connection outlived its credential", renewed.left)
	await("the worker did not connect with its renewed credential", renewed.back)
	former := connect(1)
	authority.Follow(func(context.Context, string) (credential.Standing, error) {
		return credential.Standing{Incarnation: 2}, nil
	})
	await("the connection outlived its incarnation", former.left)
	if err := renewed.Flush(); err != nil || former.IsConnected() {
		t.Errorf("the newest incarnation: %v; the former one is connected: %v", err, former.IsConnected())
	}
}
