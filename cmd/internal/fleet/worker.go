package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/proto/gen/names"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

const (
	expires   = 20 * time.Second // of a pull, as in rollout_workers/worker/stream.py
	heartbeat = 2 * time.Second
)

// worker is one inference worker between the two streams.
type worker struct {
	fleet      *fleet
	spec       *runv1.WorkerSpec
	work       *nats.Conn
	heartbeats *nats.Conn // the worker's second thread
	inbox      string
	next       string // where pulls go
	slots      chan struct{}

	mu     sync.Mutex
	active map[string]bool // reply subjects of active work
	serial int
	owed   int // groups that were asked for and have not come
	left   int // samples in hand that are not finished
	begun  int // samples, up to the number of slots
	done   int // samples since the last event
	tokens int
}

func (w *worker) connect() (err error) {
	options := []nats.Option{
		nats.Token(w.spec.GetNatsToken()), nats.CustomInboxPrefix("_INBOX_" + w.spec.GetRunId()), nats.Name(w.spec.GetWorkerId()), nats.Timeout(30 * time.Second), nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true),
	}
	if w.work, err = nats.Connect(w.spec.GetNatsUrl(), options...); err != nil {
		return fmt.Errorf("connect to NATS: %w", err)
	}
	if w.heartbeats, err = nats.Connect(w.spec.GetNatsUrl(), options...); err != nil {
		w.work.Close()
		return fmt.Errorf("connect to NATS: %w", err)
	}
	w.inbox = w.work.NewInbox()
	w.next = "$JS.API.CONSUMER.MSG.NEXT." + names.WorkStream(w.spec.GetRunId()) + "." + names.WorkersConsumer
	w.slots = make(chan struct{}, w.spec.GetPlan().GetConfig().GetEngine().GetSlots())
	w.active = map[string]bool{}
	return nil
}

func (w *worker) close() {
	w.work.Close()
	w.heartbeats.Close()
}

// run pulls and samples until ctx ends.
func (w *worker) run(ctx context.Context) error {
	arrived := make(chan *nats.Msg, 256)
	listening, err := w.work.ChanSubscribe(w.inbox+".*", arrived)
	if err != nil {
		return fmt.Errorf("listen for work: %w", err)
	}
	defer func() { _ = listening.Unsubscribe() }()
	w.ask()
	beat := time.NewTicker(time.Second)
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-beat.C:
			w.beat()
		case m := <-arrived:
			w.receive(ctx, m)
		}
	}
}

// ask pulls as many groups as there is room for: enough to fill the slots, and a quarter more.
func (w *worker) ask() {
	config := w.spec.GetPlan().GetConfig()
	size := int(config.GetSampling().GetGroupSize())
	full := max(1, int(config.GetEngine().GetSlots())/size)
	w.mu.Lock()
	groups := full + max(1, full/4) - (w.left+size-1)/size - w.owed
	if groups <= 0 {
		w.mu.Unlock()
		return
	}
	w.owed += groups
	w.serial++
	name := fmt.Sprintf("%s.%d", w.inbox, w.serial)
	w.mu.Unlock()
	body, err := json.Marshal(map[string]int64{"batch": int64(groups), "expires": int64(expires), "idle_heartbeat": int64(heartbeat)})
	if err == nil {
		err = w.work.PublishRequest(w.next, name, body)
	}
	if err != nil {
		w.fleet.log.Error("pull", "error", err)
	}
}

// beat acknowledges progress of the active groups and reports the samples since the last beat.
func (w *worker) beat() {
	w.mu.Lock()
	replies := make([]string, 0, len(w.active))
	for reply := range w.active {
		replies = append(replies, reply)
	}
	done, tokens := w.done, w.tokens
	w.done, w.tokens = 0, 0
	w.mu.Unlock()
	for _, reply := range replies {
		_ = w.heartbeats.Publish(reply, []byte("+WPI")) // the next beat tries again
	}
	now := time.Now()
	version, _ := w.fleet.weights.now()
	batch := &eventv1.EventBatch{Events: []*eventv1.Event{{
		EventId: id.New(now), RunId: w.spec.GetRunId(), Time: timestamppb.New(now), Service: "inference-worker/" + w.spec.GetWorkerId(),
		Level: eventv1.Level_LEVEL_INFO, Kind: "sampling", Step: version,
		Metrics: map[string]float64{"samples": float64(done), "samples_per_second": float64(done), "tokens_per_second": float64(tokens), "time/engine": 1, "time/engine_forward": 1},
	}}}
	body, err := proto.Marshal(batch)
	if err == nil {
		err = w.heartbeats.Publish(bus.EventSubject(w.spec.GetRunId()), body)
	}
	if err != nil {
		w.fleet.log.Error("event", "error", err)
	}
}

// receive takes a group, or the end of a pull.
func (w *worker) receive(ctx context.Context, m *nats.Msg) {
	if status := m.Header.Get("Status"); status != "" && m.Reply == "" {
		if status != "100" { // a heartbeat
			left := 0
			_, _ = fmt.Sscan(m.Header.Get("Nats-Pending-Messages"), &left)
			w.mu.Lock()
			w.owed = max(0, w.owed-left)
			w.mu.Unlock()
			w.ask()
		}
		return
	}
	group := &runv1.PromptGroup{}
	if err := proto.Unmarshal(m.Data, group); err != nil {
		w.fleet.log.Error("decode a group", "error", err)
		return
	}
	w.mu.Lock()
	w.active[m.Reply] = true
	w.owed = max(0, w.owed-1)
	w.left += int(group.GetGroupSize())
	w.mu.Unlock()
	go w.sample(ctx, group, m.Reply)
}

// rest returns the part of a sample that is left to generate. The first samples of each slot begin
// at a random place, as if the worker had been running for a while; all others are whole.
func (w *worker) rest() float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.begun == cap(w.slots) {
		return 1
	}
	w.begun++
	return rand.Float64()
}

// sample waits for the group's weights, then for each sample for a slot and its time, and publishes
// the group.
func (w *worker) sample(ctx context.Context, group *runv1.PromptGroup, reply string) {
	version, changed := w.fleet.weights.now()
	for version < group.GetMinVersion() {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			version, changed = w.fleet.weights.now()
		}
	}
	made := make([]sampled, group.GetGroupSize())
	var wg sync.WaitGroup
	for n := range made {
		length := w.fleet.pace.length(rand.New(rand.NewPCG(group.GetSeeds()[n], 0)))
		select {
		case w.slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		rest := w.rest()
		wg.Go(func() {
			version, _ := w.fleet.weights.now()
			made[n] = sampled{tokens: length, version: version}
			timer := time.NewTimer(time.Duration(rest * float64(length) / w.fleet.pace.rate * float64(time.Second)))
			defer timer.Stop()
			select {
			case <-timer.C:
			case <-ctx.Done():
			}
			<-w.slots
			w.mu.Lock()
			w.left--
			w.mu.Unlock()
			w.ask()
		})
	}
	wg.Wait()
	if ctx.Err() == nil {
		w.publish(ctx, group, made, reply)
	}
}
