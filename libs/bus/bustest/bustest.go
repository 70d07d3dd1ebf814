// Package bustest is the suite for every kind of server that a bus.Bus can connect to: embedded, a
// single own, a cluster.
package bustest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nkeys"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/proto/gen/names"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Run checks the servers at o. They may serve others too.
func Run(t *testing.T, o bus.Options) {
	for name, test := range map[string]func(*testing.T, *bundle){
		"PublishFetchAck":               publishFetchAck,
		"FetchDoesNotWaitForAFullBatch": noFullBatch,
		"FetchWakesForAMessage":         fetchWakes,
		"NakTermAndAttempts":            nakTerm,
		"SilentWorkersItemsGoToAnother": redelivery,
		"BadBodyIsTyped":                badBody,
		"TraceCrossesTheBus":            traceCrosses,
		"EnsureAgainKeepsAndDeleteEnds": ensureAgain,
		"RefusalsAreTyped":              refusals,
		"EventsOfAllRuns":               events,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, setup(t, o))
		})
	}
}

// bundle is a connection with the streams of a new run, and the consumer of its work.
type bundle struct {
	options bus.Options
	bus     *bus.Bus
	run     string
	work    *bus.Consumer
}

func connect(t *testing.T, o bus.Options) *bus.Bus {
	t.Helper()
	b, err := bus.Connect(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

func setup(t *testing.T, o bus.Options) *bundle {
	t.Helper()
	b := &bundle{options: o, bus: connect(t, o), run: id.NewRun(time.Now())}
	if err := b.bus.EnsureRun(t.Context(), b.run); err != nil {
		t.Fatal(err)
	}
	var err error
	if b.work, err = b.bus.Work(t.Context(), b.run); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *bundle) group(i int) *runv1.PromptGroup {
	return &runv1.PromptGroup{RunId: b.run, Index: uint64(i)}
}

func (b *bundle) publish(t *testing.T, n int) {
	t.Helper()
	var ms []bus.Message
	for i := range n {
		ms = append(ms, bus.Message{Subject: names.WorkSubject(b.run), Body: b.group(i), ID: fmt.Sprint(b.run, i)})
	}
	if err := b.bus.Publish(t.Context(), ms...); err != nil {
		t.Fatal(err)
	}
}

// fetch fetches exactly n deliveries.
func (b *bundle) fetch(t *testing.T, n int) []*bus.Delivery { t.Helper(); return fetch(t, b.work, n) }

// fetch takes exactly n deliveries.
func fetch(t *testing.T, c *bus.Consumer, n int) []*bus.Delivery {
	t.Helper()
	var got []*bus.Delivery
	for len(got) < n {
		more, err := c.Fetch(t.Context(), n-len(got), time.Minute)
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

// reaches waits until the consumer reports a depth: in a cluster the consumer's leader is notified
// slightly after the stream's.
func reaches(t *testing.T, c *bus.Consumer, want bus.Depth) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; <-time.After(5 * time.Millisecond) {
		got, err := c.Depth(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v, want %+v", got, want)
		}
	}
}

func publishFetchAck(t *testing.T, b *bundle) {
	b.publish(t, 100)
	b.publish(t, 100) // the same ids: dropped
	reaches(t, b.work, bus.Depth{Waiting: 100})
	for i, d := range b.fetch(t, 100) {
		var got runv1.PromptGroup
		if err := d.Decode(&got); err != nil || !proto.Equal(&got, b.group(i)) {
			t.Fatalf("delivery %d: %v %v", i, &got, err)
		}
		if d.Attempt() != 1 || d.Sequence() != uint64(i+1) {
			t.Fatalf("attempt %d sequence %d", d.Attempt(), d.Sequence())
		}
		if err := d.AckConfirmed(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	reaches(t, b.work, bus.Depth{})
}

func noFullBatch(t *testing.T, b *bundle) {
	b.publish(t, 3)
	began := time.Now()
	for came := 0; came < 3; { // a server acks a message slightly before its consumers receive it
		got, err := b.work.Fetch(t.Context(), 100, 10*time.Minute)
		if came += len(got); err != nil || len(got) == 0 || came > 3 || time.Since(began) > 5*time.Minute {
			t.Fatalf("%d deliveries in %v: %v", came, time.Since(began), err)
		}
	}
	if got, err := b.work.Fetch(t.Context(), 100, 10*time.Millisecond); err != nil || len(got) != 0 {
		t.Errorf("an empty queue: %d %v", len(got), err)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.work.Fetch(canceled, 1, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

func fetchWakes(t *testing.T, b *bundle) {
	out := make(chan int)
	go func() {
		got, _ := b.work.Fetch(t.Context(), 10, time.Minute)
		out <- len(got)
	}()
	b.publish(t, 1)
	if n := <-out; n != 1 {
		t.Errorf("%d came", n)
	}
}

func nakTerm(t *testing.T, b *bundle) {
	b.publish(t, 1)
	if err := b.fetch(t, 1)[0].Nak(0); err != nil {
		t.Fatal(err)
	}
	again := b.fetch(t, 1)[0]
	if again.Attempt() != 2 {
		t.Errorf("attempt %d", again.Attempt())
	}
	if err := errors.Join(again.Progress(), again.Term("bad")); err != nil {
		t.Fatal(err)
	}
	if got, err := b.work.Fetch(t.Context(), 1, 50*time.Millisecond); err != nil || len(got) != 0 {
		t.Errorf("a terminated message was delivered again: %d %v", len(got), err)
	}
}

func badBody(t *testing.T, b *bundle) {
	if err := b.bus.Conn().Publish(names.WorkSubject(b.run), []byte("\xff\xff\xff")); err != nil {
		t.Fatal(err)
	}
	if err := b.fetch(t, 1)[0].Decode(&runv1.PromptGroup{}); !errors.Is(err, bus.ErrBody) {
		t.Errorf("got %v", err)
	}
}

func traceCrosses(t *testing.T, b *bundle) {
	sc := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	if err := b.bus.PublishProto(trace.ContextWithSpanContext(t.Context(), sc), names.WorkSubject(b.run), b.group(0)); err != nil {
		t.Fatal(err)
	}
	d := b.fetch(t, 1)[0]
	if got := trace.SpanContextFromContext(d.Context(t.Context())); got.TraceID() != sc.TraceID() {
		t.Errorf("trace %v", got.TraceID())
	}
	if !strings.HasPrefix(d.Header("traceparent"), "00-01") {
		t.Errorf("traceparent %q", d.Header("traceparent"))
	}
}

func ensureAgain(t *testing.T, b *bundle) {
	b.publish(t, 2)
	if err := b.bus.EnsureRun(t.Context(), b.run); err != nil {
		t.Fatal(err)
	}
	reaches(t, b.work, bus.Depth{Waiting: 2})
	mark, err := b.bus.WorkMark(t.Context(), b.run)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.bus.PublishProto(t.Context(), names.WorkSubject(b.run), b.group(2)); err != nil { // of another worker
		t.Fatal(err)
	}
	if runs, err := b.bus.Runs(t.Context()); err != nil || !slices.Contains(runs, b.run) {
		t.Errorf("runs with streams: %v %v", runs, err)
	}
	for range 2 {
		if err := b.bus.PurgeWork(t.Context(), b.run, mark); err != nil {
			t.Fatal(err)
		}
	}
	reaches(t, b.work, bus.Depth{Waiting: 1})
	for range 2 {
		if err := b.bus.DeleteRun(t.Context(), b.run); err != nil {
			t.Fatal(err)
		}
	}
	if runs, err := b.bus.Runs(t.Context()); err != nil || slices.Contains(runs, b.run) {
		t.Errorf("runs with streams: %v %v", runs, err)
	}
	if _, err := b.bus.Work(t.Context(), b.run); !errors.Is(err, bus.ErrNoStream) {
		t.Errorf("consumer of a deleted run: %v", err)
	}
	if err := b.bus.PublishProto(t.Context(), names.WorkSubject(b.run), b.group(0)); err == nil {
		t.Error("published into a deleted run")
	}
}

func redelivery(t *testing.T, b *bundle) {
	b.publish(t, 1)
	if first := b.fetch(t, 1)[0]; first.Attempt() != 1 {
		t.Fatalf("attempt %d", first.Attempt())
	}
	other, err := connect(t, b.options).Work(t.Context(), b.run)
	if err != nil {
		t.Fatal(err)
	}
	again := fetch(t, other, 1)[0] // the first falls silent
	if again.Attempt() != 2 {
		t.Errorf("attempt %d", again.Attempt())
	}
	if err := again.AckConfirmed(t.Context()); err != nil {
		t.Fatal(err)
	}
	reaches(t, b.work, bus.Depth{})
}

func refusals(t *testing.T, b *bundle) {
	for _, name := range []string{"", "a.b", "run-1.>", "*", "a b"} {
		if err := b.bus.EnsureRun(t.Context(), name); !errors.Is(err, bus.ErrRunName) {
			t.Errorf("run %q: %v", name, err)
		}
	}
	big := &runv1.PromptGroup{RowJson: make([]byte, bus.MaxPayload+1)}
	if err := b.bus.PublishProto(t.Context(), names.WorkSubject(b.run), big); !errors.Is(err, bus.ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	gone, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	unreachable := b.options
	unreachable.URL, unreachable.TLS = "nats://127.0.0.1:1", nil
	if _, err := bus.Connect(gone, unreachable); !errors.Is(err, bus.ErrUnavailable) {
		t.Errorf("no server: %v", err)
	}
	if err := b.bus.DeleteRun(t.Context(), b.run); err != nil {
		t.Fatal(err)
	}
	message := bus.Message{Subject: names.WorkSubject(b.run), Body: b.group(0), ID: b.run}
	if err := b.bus.Publish(t.Context(), message); !errors.Is(err, bus.ErrNoStream) {
		t.Errorf("into a deleted run: %v", err)
	}
	if b.options.Token+b.options.User+b.options.NKeySeed == "" {
		return // it accepts every client
	}
	other, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	seed, err := other.Seed()
	if err != nil {
		t.Fatal(err)
	}
	for name, wrong := range map[string]bus.Options{
		"nothing": {}, "token": {Token: "wrong"}, "user": {User: "wrong", Password: "wrong"}, "nkey": {NKeySeed: string(seed)},
	} {
		wrong.URL, wrong.TLS = b.options.URL, b.options.TLS
		if _, err := bus.Connect(t.Context(), wrong); !errors.Is(err, bus.ErrToken) {
			t.Errorf("wrong %s: %v", name, err)
		}
	}
}

func events(t *testing.T, b *bundle) {
	if err := b.bus.EnsureEvents(t.Context()); err != nil {
		t.Fatal(err)
	}
	c, err := b.bus.Events(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []string{b.run, "", "other"} {
		if err := b.bus.PublishProto(t.Context(), bus.EventSubject(r), b.group(0)); err != nil {
			t.Fatal(err)
		}
	}
	got := fetch(t, c, 3)
	if got[1].Subject() != names.MeshEvents || got[2].Subject() != "rollout.events.other" {
		t.Errorf("subjects %s %s", got[1].Subject(), got[2].Subject())
	}
	for _, d := range got[1:] {
		if err := d.AckConfirmed(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	storedAfter(t, b, got[0])
}

// storedAfter checks that EventsStored waits for an event that was fetched before others and not
// acked.
func storedAfter(t *testing.T, b *bundle, last *bus.Delivery) {
	t.Helper()
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := b.bus.EventsStored(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with an event that was not stored: %v", err)
	}
	stored := make(chan error, 1)
	go func() { stored <- b.bus.EventsStored(t.Context()) }()
	if err := last.AckConfirmed(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-stored; err != nil {
		t.Error(err)
	}
}
