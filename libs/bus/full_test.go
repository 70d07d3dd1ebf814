package bus_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/proto/gen/names"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// small is a connection to a server with a limit of its storage.
func small(t *testing.T, bytes int64) *bus.Bus {
	t.Helper()
	srv, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true,
		JetStreamMaxMemory: 1 << 20, JetStreamMaxStore: bytes, MaxPayload: bus.MaxPayload,
	})
	if err != nil {
		t.Fatal(err)
	}
	go srv.Start()
	t.Cleanup(func() { srv.Shutdown(); srv.WaitForShutdown() })
	if !srv.ReadyForConnections(time.Minute) {
		t.Fatal("the server does not start")
	}
	b, err := bus.Connect(t.Context(), bus.Options{URL: srv.ClientURL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// A full server fails a publish at once with ErrFull, without retries.
func TestNoRoom(t *testing.T) {
	t.Parallel()
	b := small(t, 4<<20)
	if err := b.EnsureEvents(t.Context()); !errors.Is(err, bus.ErrFull) {
		t.Errorf("the stream of the events on a small server: %v", err)
	}
	if err := b.Try(t.Context()); !errors.Is(err, bus.ErrFull) || rpcerr.Fix(err) == "" {
		t.Errorf("tried on a small server: %v", err)
	}
	if err := b.EnsureRun(t.Context(), run); err != nil {
		t.Fatal(err) // reserves nothing
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	message := bus.Message{Subject: names.WorkSubject(run), Body: &runv1.PromptGroup{RowJson: make([]byte, 1<<20)}}
	var err error
	for n := 0; err == nil && n < 8; n++ {
		message.ID = string(rune('a' + n))
		err = b.Publish(ctx, message)
	}
	if !errors.Is(err, bus.ErrFull) || rpcerr.Code(err) != codes.ResourceExhausted || ctx.Err() != nil {
		t.Errorf("more than there is room for: %v", err)
	}
	mark, err := b.WorkMark(t.Context(), run)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.PurgeWork(t.Context(), run, mark); err != nil {
		t.Fatal(err)
	}
	if err := b.Publish(ctx, message); err != nil { // the same message
		t.Errorf("when there is room again: %v", err)
	}
}

func TestTryLeavesNothing(t *testing.T) {
	t.Parallel()
	b := small(t, 4<<30)
	for range 2 { // before and after the event stream exists
		if err := b.Try(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := b.EnsureEvents(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for name := range b.JetStream().StreamNames(t.Context()).Name() {
		if name != names.EventStream {
			t.Errorf("it kept %s", name)
		}
	}
}
