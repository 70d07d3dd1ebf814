package live

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// restarting is a control plane that stops while it streams, and starts again at the same address.
type restarting struct {
	t       *testing.T
	mu      sync.Mutex
	after   []uint64 // positions at which tails began
	watches int
	cut     map[uint64]bool // events with which the process ends; a message has two events
	stop    func()
}

const events = 40

// The services: the methods of a control plane, and no others.
type (
	noEvents struct {
		storagev1.UnimplementedEventServiceServer
	}
	noRuns struct {
		runv1.UnimplementedSchedulerServiceServer
	}
	eventService struct {
		noEvents
		*restarting
	}
	runService struct {
		noRuns
		*restarting
	}
)

func (r *restarting) TailEvents(req *storagev1.TailEventsRequest, stream grpc.ServerStreamingServer[storagev1.TailEventsResponse]) error {
	r.mu.Lock()
	r.after = append(r.after, req.GetFilter().GetAfterSequence())
	r.mu.Unlock()
	for next := req.GetFilter().GetAfterSequence() + 1; next <= events; next += 2 {
		response := &storagev1.TailEventsResponse{}
		for n := next; n < next+2 && n <= events; n++ {
			response.Events = append(response.Events, &eventv1.Event{Sequence: n})
		}
		if err := stream.Send(response); err != nil {
			return err
		}
		if r.ends(next) || r.ends(next+1) {
			break // until the client has it, and the process ends
		}
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

// ends reports whether the process ends when the client has an event.
func (r *restarting) ends(event uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cut[event]
}

// WatchRun ends its first stream without an error and without the end of the run.
func (r *restarting) WatchRun(_ *runv1.WatchRunRequest, stream grpc.ServerStreamingServer[runv1.WatchRunResponse]) error {
	r.mu.Lock()
	r.watches++
	state := runv1.RunState_RUN_STATE_RUNNING
	if r.watches > 1 {
		state = runv1.RunState_RUN_STATE_SUCCEEDED
	}
	r.mu.Unlock()
	return stream.Send(&runv1.WatchRunResponse{Status: &runv1.RunStatus{Run: &runv1.Run{State: state}}})
}

// serve starts the control plane. When it stops it starts again, until the test ends.
func (r *restarting) serve() *client.Client {
	listener, err := (&net.ListenConfig{}).Listen(r.t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	address := listener.Addr().String()
	restart := make(chan struct{}, 1)
	r.stop = func() { restart <- struct{}{} }
	var done sync.WaitGroup
	ended := make(chan struct{})
	done.Go(func() {
		for {
			server := grpc.NewServer()
			storagev1.RegisterEventServiceServer(server, eventService{restarting: r})
			runv1.RegisterSchedulerServiceServer(server, runService{restarting: r})
			healthpb.RegisterHealthServer(server, health.NewServer())
			done.Go(func() { _ = server.Serve(listener) })
			select {
			case <-restart:
				server.Stop() // cuts the connections
			case <-ended:
				server.Stop()
				return
			}
			if listener, err = (&net.ListenConfig{}).Listen(context.Background(), "tcp", address); err != nil {
				r.t.Errorf("start again: %v", err)
				return
			}
		}
	})
	r.t.Cleanup(func() { close(ended); done.Wait() })
	soon := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1, MaxDelay: 10 * time.Millisecond}, MinConnectTimeout: time.Second}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(soon))
	if err != nil {
		r.t.Fatal(err)
	}
	c := client.Of(conn, "test")
	r.t.Cleanup(func() { _ = conn.Close() })
	return c
}

// A tail whose connection is cut continues after its last event.
func TestATailResumesWhereItStopped(t *testing.T) {
	t.Parallel()
	r := &restarting{t: t, cut: map[uint64]bool{4: true, 10: true, 11: true, 37: true}}
	c := r.serve()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var got []uint64
	err := Tail(ctx, c, &storagev1.EventFilter{RunId: "run-1"}, func(e *eventv1.Event) error {
		got = append(got, e.GetSequence())
		if e.GetSequence() == events {
			cancel()
		}
		if r.ends(e.GetSequence()) {
			r.mu.Lock()
			delete(r.cut, e.GetSequence())
			r.mu.Unlock()
			r.stop()
		}
		return nil
	})
	var want []uint64
	for n := range uint64(events) {
		want = append(want, n+1)
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v (%v), want each event once", got, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.after) < 5 || r.after[0] != 0 || !slices.IsSorted(r.after) {
		t.Errorf("the tails began after %v; the connection was cut several times", r.after)
	}
}

// A watch that the server ends before the run has ended is opened again.
func TestAWatchContinuesUntilTheRunIsOver(t *testing.T) {
	t.Parallel()
	r := &restarting{t: t}
	var states []runv1.RunState
	err := Watch(t.Context(), r.serve(), "run-1", func(s *runv1.RunStatus) error {
		states = append(states, s.GetRun().GetState())
		return nil
	})
	if want := []runv1.RunState{runv1.RunState_RUN_STATE_RUNNING, runv1.RunState_RUN_STATE_SUCCEEDED}; err != nil || !slices.Equal(states, want) {
		t.Errorf("states %v, %v", states, err)
	}
}
