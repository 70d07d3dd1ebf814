package external_test

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/launch/external"
	"github.com/rollout-rl/rollout/services/scheduler/launch/launchtest"
	"github.com/rollout-rl/rollout/services/scheduler/launch/local"
)

type server struct {
	runv1.UnimplementedPlaceServiceServer
	pool *external.Pool
}

func (s server) Join(stream runv1.PlaceService_JoinServer) error {
	return s.pool.Join(stream)
}

// serve makes a pool, and a client of it.
func serve(t *testing.T) (*external.Pool, runv1.PlaceServiceClient) {
	t.Helper()
	pool := external.New("scheduler:7000", launchtest.Kind)
	g := grpc.NewServer(grpc.ChainStreamInterceptor(rpcerr.Stream(nil)))
	runv1.RegisterPlaceServiceServer(g, server{pool: pool})
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = g.Serve(lis) }()
	t.Cleanup(g.Stop)
	conn, err := grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return pool, runv1.NewPlaceServiceClient(conn)
}

// host is a place that runs what it is assigned with package local, as rollout-worker does in
// Python.
type host struct {
	t      *testing.T
	stream runv1.PlaceService_JoinClient
	sends  sync.Mutex
	ended  chan error
	vanish context.CancelFunc
}

func (h *host) send(r *runv1.JoinRequest) {
	h.sends.Lock()
	defer h.sends.Unlock()
	_ = h.stream.Send(r) // a stream that has ended reports it to Recv
}

func join(t *testing.T, client runv1.PlaceServiceClient, kind string) *host {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	stream, err := client.Join(ctx)
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, stream: stream, ended: make(chan error, 1), vanish: cancel}
	h.send(&runv1.JoinRequest{Report: &runv1.JoinRequest_Place{Place: &runv1.Place{Kind: kind, Host: "gpu-7", Pid: 41}}})
	go h.serve()
	return h
}

func (h *host) serve() {
	running := map[string]launch.Process{}
	defer func() {
		for _, p := range running {
			p.Stop(0)
		}
	}()
	for {
		order, err := h.stream.Recv()
		if err != nil {
			h.ended <- err
			return
		}
		if a := order.GetAssignment(); a != nil {
			p, err := local.Launcher{}.Launch(launch.Command{Args: a.GetArguments(), Env: a.GetEnvironment(), Dir: a.GetDirectory(), Log: a.GetLog()})
			if err != nil {
				h.send(&runv1.JoinRequest{Report: &runv1.JoinRequest_Exited{Exited: &runv1.WorkerExited{Id: a.GetId(), Code: -1, NotStarted: err.Error()}}})
				continue
			}
			running[a.GetId()] = p
			h.send(&runv1.JoinRequest{Report: &runv1.JoinRequest_Started{Started: &runv1.WorkerStarted{Id: a.GetId()}}})
			go func() {
				e := p.Exit()
				h.send(&runv1.JoinRequest{Report: &runv1.JoinRequest_Exited{Exited: &runv1.WorkerExited{
					Id: a.GetId(), Code: int32(e.Code), Signal: e.Signal, LastLines: e.LastLines,
				}}})
			}()
		}
		if s := order.GetStop(); s != nil {
			go running[s.GetId()].Stop(time.Duration(s.GetGraceMs()) * time.Millisecond)
		}
	}
}

func (h *host) leave() {
	h.send(&runv1.JoinRequest{Report: &runv1.JoinRequest_Leaves{Leaves: &runv1.PlaceLeaves{}}})
}

func TestLauncher(t *testing.T) {
	t.Parallel()
	pool, client := serve(t)
	for range 4 {
		join(t, client, launchtest.Kind)
	}
	launchtest.Run(t, pool, nil)
}

func sleeper(t *testing.T) launch.Command {
	return launch.Command{
		Worker: "inference-0", Kind: launchtest.Kind, Args: []string{"/bin/sleep", "1000"}, Log: filepath.Join(t.TempDir(), "log"),
	}
}

func start(t *testing.T, pool *external.Pool) launch.Queued {
	t.Helper()
	p, err := pool.Launch(sleeper(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop(0) })
	return p.(launch.Queued)
}

func await(t *testing.T, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatalf("%s has not happened", what)
	}
}

// A process waits for a place, and says how to start one.
func TestAProcessWaitsForAPlace(t *testing.T) {
	t.Parallel()
	pool, client := serve(t)
	p := start(t, pool)
	want := launch.Awaited{
		Owner: "user", Reason: "WORKER_AWAITED", What: "external inference worker",
		Fix: "start them with `rollout-worker inference --join scheduler:7000 --token FILE`",
	}
	if got := <-p.Awaits(); got != want {
		t.Errorf("awaits %+v, want %+v", got, want)
	}
	select {
	case <-p.Began():
		t.Fatal("began without a place")
	default:
	}
	join(t, client, launchtest.Kind)
	await(t, "the start", p.Began())
}

func TestAProcessThatIsStoppedBeforeItStarts(t *testing.T) {
	t.Parallel()
	pool, client := serve(t)
	p := start(t, pool)
	p.Stop(time.Hour)
	if e := p.Exit(); e.NotStarted == "" {
		t.Errorf("exit %+v", e)
	}
	next := start(t, pool)
	join(t, client, launchtest.Kind)
	await(t, "the start of the next process", next.Began())
}

// A place that leaves or vanishes ends its process, which is not a crash, and the next process
// waits for another place.
func TestPlacesLeaveAtAnyTime(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		end  func(h *host, p launch.Process)
		left string
	}{
		"leaves":   {func(h *host, p launch.Process) { h.leave(); p.Stop(time.Minute) }, "was withdrawn from gpu-7 (process 41) by its operator"},
		"vanishes": {func(h *host, _ launch.Process) { h.vanish() }, "was lost: the connection to its host process at gpu-7 (process 41) ended"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, client := serve(t)
			h, p := join(t, client, launchtest.Kind), start(t, pool)
			await(t, "the start", p.Began())
			test.end(h, p)
			await(t, "the exit", p.Done())
			if e := p.Exit(); e.Left != test.left || e.String() != test.left {
				t.Errorf("exit %+v, want %q", e, test.left)
			}
			if err := <-h.ended; errors.Is(err, io.EOF) != (name == "leaves") {
				t.Errorf("the stream ended with %v", err)
			}
			next := start(t, pool)
			join(t, client, launchtest.Kind)
			await(t, "the start at another place", next.Began())
		})
	}
}

func TestJoinRefuses(t *testing.T) {
	t.Parallel()
	_, client := serve(t)
	err := <-join(t, client, "learner").ended
	if rpcerr.Reason(err) != "EXTERNAL_KIND_OFF" || !strings.Contains(rpcerr.Fix(err), "launch.learner.kind") {
		t.Errorf("another kind: %v, fix %q", err, rpcerr.Fix(err))
	}
	stream, err := client.Join(t.Context())
	if err == nil {
		err = stream.Send(&runv1.JoinRequest{Report: &runv1.JoinRequest_Leaves{}})
	}
	if err == nil {
		_, err = stream.Recv()
	}
	if rpcerr.Reason(err) != "EXTERNAL_PLACE" {
		t.Errorf("no description: %v", err)
	}
}

func TestCloseSendsPlacesAway(t *testing.T) {
	t.Parallel()
	pool, client := serve(t)
	h := join(t, client, launchtest.Kind)
	pool.Close()
	if err := <-h.ended; rpcerr.Reason(err) != rpcerr.ReasonDraining {
		t.Errorf("ended with %v", err)
	}
}

func TestAKindThatIsNotExternal(t *testing.T) {
	t.Parallel()
	pool, _ := serve(t)
	if p, err := pool.Launch(launch.Command{Kind: "learner", Args: []string{"/bin/true"}}); err == nil {
		t.Errorf("%s was launched", p.ID())
	}
}

// ByKind starts each worker with the launcher of its kind.
func TestByKind(t *testing.T) {
	t.Parallel()
	pool, client := serve(t)
	join(t, client, launchtest.Kind)
	by := launch.ByKind{Default: local.Launcher{}, Kinds: map[string]launch.Named{launchtest.Kind: {Name: "external", Launcher: pool}}}
	for kind, prefix := range map[string]string{launchtest.Kind: "external-", "learner": "local-"} {
		c := sleeper(t)
		c.Kind = kind
		p, err := by.Launch(c)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(p.ID(), prefix) {
			t.Errorf("a worker of the kind %s is %s", kind, p.ID())
		}
		p.Stop(0)
	}
	if _, err := by.Adopt("external:1"); !errors.Is(err, launch.ErrGone) {
		t.Errorf("adopt: %v", err)
	}
}
