package bus_test

import (
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/proto/gen/names"
)

// A worker's token reaches the subjects of its run: it publishes there, and neither reads nor
// writes what belongs to another run or to services.
func TestAWorkersTokenReachesItsRunOnly(t *testing.T) {
	t.Parallel()
	server, err := bus.StartEmbedded(t.TempDir(), bus.EmbeddedOptions{Token: "mesh", NoSync: true, Run: func(token string) (string, bool) { return "run-1", token == "worker" }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	if _, err := nats.Connect(server.URL(), nats.Token("other")); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("another token: %v", err)
	}
	refused := make(chan struct{}, 16)
	worker, err := nats.Connect(server.URL(), nats.Token("worker"), nats.CustomInboxPrefix("_INBOX_run-1"),
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
