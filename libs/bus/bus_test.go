package bus_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/bus"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

const token = "s3cret"

func start(t *testing.T, dir string, port int) *bus.Embedded {
	t.Helper()
	srv, err := bus.StartEmbedded(dir, bus.EmbeddedOptions{Token: token, NoSync: true, Port: port})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	return srv
}

func connect(t *testing.T, url string) *bus.Bus {
	t.Helper()
	b, err := bus.Connect(t.Context(), url, token, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

const run = "run-01jz0000000000000000000000"

// setup gives a server of its own, a connection and the streams of a run.
func setup(t *testing.T) (*bus.Bus, *bus.Consumer) {
	t.Helper()
	b := connect(t, start(t, t.TempDir(), 0).URL())
	if err := b.EnsureRun(t.Context(), run); err != nil {
		t.Fatal(err)
	}
	c, err := b.Work(t.Context(), run)
	if err != nil {
		t.Fatal(err)
	}
	return b, c
}

func group(i int) *runv1.PromptGroup { return &runv1.PromptGroup{RunId: run, Index: uint64(i)} }

func publish(t *testing.T, b *bus.Bus, n int) {
	t.Helper()
	var ms []bus.Message
	for i := range n {
		ms = append(ms, bus.Message{Subject: bus.WorkSubject(run), Body: group(i), ID: fmt.Sprint(run, i)})
	}
	if err := b.Publish(t.Context(), ms...); err != nil {
		t.Fatal(err)
	}
}

// fetch takes exactly n deliveries.
func fetch(t *testing.T, c *bus.Consumer, n int) []*bus.Delivery {
	t.Helper()
	var got []*bus.Delivery
	for len(got) < n {
		more, err := c.Fetch(t.Context(), n-len(got), 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if len(more) == 0 {
			t.Fatalf("%d of %d came", len(got), n)
		}
		got = append(got, more...)
	}
	return got
}

func depth(t *testing.T, c *bus.Consumer) bus.Depth {
	t.Helper()
	d, err := c.Depth(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestPublishFetchAck(t *testing.T) {
	t.Parallel()
	b, c := setup(t)
	publish(t, b, 100)
	publish(t, b, 100) // the same ids: dropped
	if d := depth(t, c); d.Waiting != 100 {
		t.Fatalf("%+v, want 100 waiting", d)
	}
	for i, d := range fetch(t, c, 100) {
		var got runv1.PromptGroup
		if err := d.Decode(&got); err != nil || !proto.Equal(&got, group(i)) {
			t.Fatalf("delivery %d: %v %v", i, &got, err)
		}
		if d.Attempt() != 1 || d.Sequence() != uint64(i+1) {
			t.Fatalf("attempt %d sequence %d", d.Attempt(), d.Sequence())
		}
		if err := d.AckConfirmed(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if d := depth(t, c); d != (bus.Depth{}) {
		t.Errorf("left: %+v", d)
	}
}

func TestFetchDoesNotWaitForAFullBatch(t *testing.T) {
	t.Parallel()
	b, c := setup(t)
	publish(t, b, 3)
	began := time.Now()
	got, err := c.Fetch(t.Context(), 100, time.Minute)
	if err != nil || len(got) != 3 || time.Since(began) > 10*time.Second {
		t.Fatalf("%d deliveries in %v: %v", len(got), time.Since(began), err)
	}
	if got, err := c.Fetch(t.Context(), 100, 10*time.Millisecond); err != nil || len(got) != 0 {
		t.Errorf("an empty queue: %d %v", len(got), err)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Fetch(canceled, 1, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

func TestFetchWakesForAMessage(t *testing.T) {
	t.Parallel()
	b, c := setup(t)
	out := make(chan int)
	go func() {
		got, _ := c.Fetch(t.Context(), 10, time.Minute)
		out <- len(got)
	}()
	publish(t, b, 1)
	if n := <-out; n != 1 {
		t.Errorf("%d came", n)
	}
}

func TestNakTermAndAttempts(t *testing.T) {
	t.Parallel()
	b, c := setup(t)
	publish(t, b, 1)
	if err := fetch(t, c, 1)[0].Nak(0); err != nil {
		t.Fatal(err)
	}
	again := fetch(t, c, 1)[0]
	if again.Attempt() != 2 {
		t.Errorf("attempt %d", again.Attempt())
	}
	if err := errors.Join(again.Progress(), again.Term("bad")); err != nil {
		t.Fatal(err)
	}
	if got, err := c.Fetch(t.Context(), 1, 50*time.Millisecond); err != nil || len(got) != 0 {
		t.Errorf("a terminated message came again: %d %v", len(got), err)
	}
}

func TestBadBodyIsTyped(t *testing.T) {
	t.Parallel()
	b, c := setup(t)
	if err := b.Conn().Publish(bus.WorkSubject(run), []byte("\xff\xff\xff")); err != nil {
		t.Fatal(err)
	}
	if err := fetch(t, c, 1)[0].Decode(&runv1.PromptGroup{}); !errors.Is(err, bus.ErrBody) {
		t.Errorf("got %v", err)
	}
}

func TestTraceCrossesTheBus(t *testing.T) {
	t.Parallel()
	b, c := setup(t)
	sc := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	if err := b.PublishProto(trace.ContextWithSpanContext(t.Context(), sc), bus.WorkSubject(run), group(0)); err != nil {
		t.Fatal(err)
	}
	d := fetch(t, c, 1)[0]
	if got := trace.SpanContextFromContext(d.Context(t.Context())); got.TraceID() != sc.TraceID() {
		t.Errorf("trace %v", got.TraceID())
	}
	if !strings.HasPrefix(d.Header("traceparent"), "00-01") {
		t.Errorf("traceparent %q", d.Header("traceparent"))
	}
}

func TestEnsureAgainKeepsMessagesAndDeleteRemovesThem(t *testing.T) {
	t.Parallel()
	b, c := setup(t)
	publish(t, b, 2)
	if err := b.EnsureRun(t.Context(), run); err != nil {
		t.Fatal(err)
	}
	if d := depth(t, c); d.Waiting != 2 {
		t.Errorf("%+v", d)
	}
	if err := b.PurgeWork(t.Context(), run); err != nil {
		t.Fatal(err)
	}
	if d := depth(t, c); d.Waiting != 0 {
		t.Errorf("after purge: %+v", d)
	}
	for range 2 {
		if err := b.DeleteRun(t.Context(), run); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.Work(t.Context(), run); !errors.Is(err, bus.ErrNoStream) {
		t.Errorf("consumer of a deleted run: %v", err)
	}
	if err := b.PublishProto(t.Context(), bus.WorkSubject(run), group(0)); err == nil {
		t.Error("published into a deleted run")
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	srv := start(t, t.TempDir(), 0)
	if _, err := bus.Connect(t.Context(), srv.URL(), "wrong", nil); !errors.Is(err, bus.ErrToken) {
		t.Errorf("wrong token: %v", err)
	}
	b := connect(t, srv.URL())
	for _, name := range []string{"", "a.b", "run-1.>", "*", "a b"} {
		if err := b.EnsureRun(t.Context(), name); !errors.Is(err, bus.ErrRunName) {
			t.Errorf("run %q: %v", name, err)
		}
	}
	big := &runv1.PromptGroup{RowJson: make([]byte, bus.MaxPayload+1)}
	if err := b.PublishProto(t.Context(), bus.WorkSubject(run), big); !errors.Is(err, bus.ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	gone, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := bus.Connect(gone, "nats://127.0.0.1:1", token, nil); !errors.Is(err, bus.ErrUnavailable) {
		t.Errorf("nobody there: %v", err)
	}
}

func TestEventsOfAllRuns(t *testing.T) {
	t.Parallel()
	b := connect(t, start(t, t.TempDir(), 0).URL())
	if err := b.EnsureEvents(t.Context()); err != nil {
		t.Fatal(err)
	}
	c, err := b.Events(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []string{run, "", "other"} {
		if err := b.PublishProto(t.Context(), bus.EventSubject(r), group(0)); err != nil {
			t.Fatal(err)
		}
	}
	got := fetch(t, c, 3)
	if got[1].Subject() != bus.MeshEvents || got[2].Subject() != "rollout.events.other" {
		t.Errorf("subjects %s %s", got[1].Subject(), got[2].Subject())
	}
}

// A server that comes back on its directory and port has the unacked messages, and connections find it again.
func TestSurvivesARestart(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "nats")
	srv := start(t, dir, 0)
	_, p, _ := net.SplitHostPort(strings.TrimPrefix(srv.URL(), "nats://"))
	port, err := strconv.Atoi(p)
	if err != nil {
		t.Fatal(err)
	}
	b := connect(t, srv.URL())
	if err := b.EnsureRun(t.Context(), run); err != nil {
		t.Fatal(err)
	}
	publish(t, b, 5)
	srv.Stop()
	start(t, dir, port)
	c, err := b.Work(t.Context(), run)
	for err != nil && t.Context().Err() == nil { // until it has reconnected
		c, err = b.Work(t.Context(), run)
	}
	if err != nil {
		t.Fatal(err)
	}
	if got := fetch(t, c, 5); len(got) != 5 {
		t.Errorf("%d came", len(got))
	}
}

func TestReadyInNoTime(t *testing.T) {
	began := time.Now()
	srv := start(t, t.TempDir(), 0)
	t.Logf("ready in %v", time.Since(began))
	if time.Since(began) > time.Second { // 30 ms on a quiet machine
		t.Error("slow start")
	}
	if !strings.HasPrefix(srv.URL(), "nats://127.0.0.1:") {
		t.Errorf("url %s", srv.URL())
	}
}
