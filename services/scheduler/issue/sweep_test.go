package issue

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"log/slog"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// sixGroups is what one window of the runs below issues.
const sixGroups = 6

// courier is a run on a real NATS server, whose groups a worker and a buffer take when the test
// says so.
type courier struct {
	t   *testing.T
	bus *bus.Bus
	run string
	*around

	mu       sync.Mutex
	arrived  map[uint64]int // by position: how often the ledger was sent the group
	complete chan struct{}  // closed when the ledger has all groups
	events   []string
}

func (c *courier) EnsureRun(ctx context.Context, run string) error { return c.bus.EnsureRun(ctx, run) }

func (c *courier) Publish(ctx context.Context, messages ...bus.Message) error {
	return c.bus.Publish(ctx, messages...)
}

func (c *courier) InspectRun(ctx context.Context, run string) (*bus.RunState, error) {
	return c.bus.InspectRun(ctx, run)
}

func (c *courier) ListIncompleteGroups(_ context.Context, in *bufferv1.ListIncompleteGroupsRequest, _ ...grpc.CallOption) (*bufferv1.ListIncompleteGroupsResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := &bufferv1.ListIncompleteGroupsResponse{}
	for p := in.GetFromPosition(); p < sixGroups; p++ {
		if c.arrived[p] == 0 {
			out.Groups = append(out.Groups, group(p, 0, 0, 0))
		}
	}
	return out, nil
}

// fetch takes up to n messages; it waits for the first one, through the loss of the stream.
func (c *courier) fetch(find func(context.Context, string) (*bus.Consumer, error), n int) []*bus.Delivery {
	for c.t.Context().Err() == nil {
		consumer, err := find(c.t.Context(), c.run)
		if err == nil {
			var got []*bus.Delivery
			if got, err = consumer.Fetch(c.t.Context(), n, 100*time.Millisecond); err == nil && len(got) > 0 {
				return got
			}
		}
		if err != nil {
			<-time.After(20 * time.Millisecond)
		}
	}
	return nil
}

// sample does the work of n groups, like a worker.
func (c *courier) sample(n int) {
	for n > 0 {
		got := c.fetch(c.bus.Work, n)
		if got == nil {
			return
		}
		for _, d := range got {
			g := &runv1.PromptGroup{}
			if err := d.Decode(g); err != nil {
				c.t.Error(err)
			}
			batch := &trajectoryv1.TrajectoryBatch{Trajectories: []*trajectoryv1.TrajectoryEnvelope{{Header: &trajectoryv1.TrajectoryHeader{
				Key: &trajectoryv1.TrajectoryKey{RunId: c.run, Index: g.GetPosition()},
			}}}}
			for c.bus.PublishProto(c.t.Context(), names.TrajSubject(c.run), batch) != nil && c.t.Context().Err() == nil {
				<-time.After(20 * time.Millisecond)
			}
			_ = d.Ack()
			n--
		}
	}
}

// ingest is the buffer: it adds n groups to the ledger.
func (c *courier) ingest(n int) {
	for n > 0 {
		got := c.fetch(c.bus.Trajectories, n)
		if got == nil {
			return
		}
		for _, d := range got {
			batch := &trajectoryv1.TrajectoryBatch{}
			if err := d.Decode(batch); err != nil {
				c.t.Error(err)
			}
			c.mu.Lock()
			for _, e := range batch.GetTrajectories() {
				c.arrived[e.GetHeader().GetKey().GetIndex()]++
			}
			if len(c.arrived) == sixGroups && c.complete != nil {
				close(c.complete)
				c.complete = nil
			}
			c.mu.Unlock()
			_ = d.Ack()
			n--
		}
	}
}

func courierOf(t *testing.T) (*Issuer, *courier) {
	t.Helper()
	server, err := bus.StartEmbedded(t.TempDir(), bus.EmbeddedOptions{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	b, err := bus.Connect(t.Context(), bus.Options{URL: server.URL()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	c := &courier{
		t: t, bus: b, run: id.NewRun(time.Now()), arrived: map[uint64]int{}, complete: make(chan struct{}),
		around: &around{state: running, ledger: &bufferv1.LedgerState{}, waits: map[retry.Awaited]string{}},
	}
	if err := b.EnsureRun(t.Context(), c.run); err != nil {
		t.Fatal(err)
	}
	text := []byte("{}\n{}\n{}\n{}\n{}\n{}\n")
	path := filepath.Join(t.TempDir(), "rows.jsonl")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	run := &runv1.Run{RunId: c.run, Incarnation: 1, Plan: &planv1.Plan{Config: &configv1.RunConfig{}}}
	log := slog.New(slog.DiscardHandler)
	emit := func(e *eventv1.Event) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.events = append(c.events, e.GetKind())
	}
	i, err := Open(Deps{
		Buffer: c, Stream: c, Cursor: c, Board: c, Retry: retry.New(c.run, c.blocked, log), Emit: emit, Log: log,
	}, run, Window{Sync: true, GroupsPerStep: sixGroups, Steps: 1}, Data{Path: path, Digest: id.Content(text), Rows: sixGroups}, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = i.Close() })
	return i, c
}

// Each stream and consumer is deleted, and messages of each class are dropped, while two groups
// are in the ledger, two in the trajectory stream, and two in the work stream. All six must reach
// the ledger within the ten seconds in which lost work is issued again.
func TestLostMessagesAreIssuedAgain(t *testing.T) {
	t.Parallel()
	stream := func(name string) func(*courier) error {
		return func(c *courier) error { return c.bus.JetStream().DeleteStream(c.t.Context(), name+c.run) }
	}
	consumer := func(name, durable string) func(*courier) error {
		return func(c *courier) error { return c.bus.JetStream().DeleteConsumer(c.t.Context(), name+c.run, durable) }
	}
	term := func(find func(*bus.Bus) func(context.Context, string) (*bus.Consumer, error)) func(*courier) error {
		return func(c *courier) error {
			for range 2 {
				if err := c.fetch(find(c.bus), 1)[0].Term("a test"); err != nil {
					return err
				}
			}
			return nil
		}
	}
	purge := func(name string) func(*courier) error {
		return func(c *courier) error {
			s, err := c.bus.JetStream().Stream(c.t.Context(), name+c.run)
			if err != nil {
				return err
			}
			return s.Purge(c.t.Context(), jetstream.WithPurgeSubject(">"))
		}
	}
	for name, test := range map[string]struct {
		lose func(*courier) error
		lost int // groups
	}{
		"work stream":           {stream(names.WorkStream("")), 2},
		"trajectory stream":     {stream(names.TrajStream("")), 2},
		"work consumer":         {consumer(names.WorkStream(""), names.WorkersConsumer), 0},
		"trajectory consumer":   {consumer(names.TrajStream(""), names.BufferConsumer), 0},
		"work messages":         {purge(names.WorkStream("")), 2},
		"trajectory messages":   {purge(names.TrajStream("")), 2},
		"terminated work":       {term(func(b *bus.Bus) func(context.Context, string) (*bus.Consumer, error) { return b.Work }), 2},
		"terminated trajectory": {term(func(b *bus.Bus) func(context.Context, string) (*bus.Consumer, error) { return b.Trajectories }), 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i, c := courierOf(t)
			complete := c.complete
			if err := i.act(t.Context()); err != nil {
				t.Fatal(err)
			}
			c.sample(4)
			c.ingest(2)
			if err := test.lose(c); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var parts sync.WaitGroup
			parts.Go(func() {
				if err := i.issue(ctx); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			})
			go c.sample(1 << 10)
			go c.ingest(1 << 10)
			select {
			case <-complete:
			case <-time.After(10 * time.Second):
				c.mu.Lock()
				t.Errorf("the ledger has %v", c.arrived)
				c.mu.Unlock()
			}
			cancel()
			parts.Wait()
			c.mu.Lock()
			defer c.mu.Unlock()
			sent := 0
			for _, n := range c.arrived {
				sent += n
			}
			if test.lost > 0 && sent != sixGroups {
				t.Errorf("%d groups were sampled to the end, want %d: %v", sent, sixGroups, c.arrived)
			}
			if fmt.Sprint(c.events) == "[]" {
				t.Error("no event reports the loss")
			}
		})
	}
}

func servers(first, last uint64, work ...bus.WorkItem) *bus.RunState {
	state := &bus.RunState{Work: map[bus.WorkItem]struct{}{}, Trajectories: bus.Backlog{First: first, Last: last}}
	for _, it := range work {
		state.Work[it] = struct{}{}
	}
	return state
}

// What is with a worker, or may be among the trajectories that the buffer has not ingested, is not
// issued again.
func TestSweepLeavesWorkThatExists(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		seen []*bus.RunState
		want []string
	}{
		"with a worker":            {[]*bus.RunState{servers(1, 0, bus.WorkItem{}), servers(1, 0, bus.WorkItem{}), servers(1, 0, bus.WorkItem{})}, nil},
		"in one sweep only":        {[]*bus.RunState{servers(1, 0), servers(1, 0, bus.WorkItem{}), servers(1, 0)}, nil},
		"not ingested":             {[]*bus.RunState{servers(3, 7), servers(5, 9), servers(7, 9)}, nil},
		"ingested without a trace": {[]*bus.RunState{servers(3, 7), servers(5, 9), servers(8, 9)}, []string{"publish 0 attempt 0"}},
		"lost with the stream":     {[]*bus.RunState{servers(3, 7), servers(1, 2)}, []string{"publish 0 attempt 0"}},
		"another attempt":          {[]*bus.RunState{servers(1, 0, bus.WorkItem{Attempt: 1}), servers(1, 0, bus.WorkItem{Attempt: 1})}, []string{"publish 0 attempt 0"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i, a := bench(t, 1, running, &bufferv1.LedgerState{})
			for _, a.servers = range test.seen {
				if err := i.sweep(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			a.want(t, test.want...)
		})
	}
}
