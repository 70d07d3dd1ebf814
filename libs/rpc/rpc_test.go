package rpc_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

const token = "s3cret"

// events is a service with a handler of each kind.
type events struct {
	storagev1.UnimplementedEventServiceServer
	list func(ctx context.Context) error
	tail func(ctx context.Context) error
}

func (e *events) ListEvents(ctx context.Context, _ *storagev1.ListEventsRequest) (*storagev1.ListEventsResponse, error) {
	return &storagev1.ListEventsResponse{}, e.list(ctx)
}

func (e *events) TailEvents(_ *storagev1.TailEventsRequest, s grpc.ServerStreamingServer[storagev1.TailEventsResponse]) error {
	if err := s.Send(&storagev1.TailEventsResponse{}); err != nil { // an answered call is not retried
		return err
	}
	return e.tail(s.Context())
}

func ok(context.Context) error { return nil }

// artifacts takes a stream of chunks.
type artifacts struct {
	storagev1.UnimplementedArtifactServiceServer
}

func (artifacts) PutArtifact(s grpc.ClientStreamingServer[storagev1.PutArtifactRequest, storagev1.PutArtifactResponse]) error {
	for {
		_, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return s.SendAndClose(&storagev1.PutArtifactResponse{})
		}
		if err != nil {
			return err
		}
	}
}

// lockedBuffer is a log that handlers and the test use at once.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}
func (l *lockedBuffer) String() string { l.mu.Lock(); defer l.mu.Unlock(); return l.b.String() }

type bundle struct {
	server  *rpc.Server
	address string
	log     *lockedBuffer
	stop    func() error // drains and waits
}

func setup(t *testing.T, e *events, o rpc.ServerOptions) *bundle {
	t.Helper()
	b := &bundle{log: &lockedBuffer{}}
	o.Log, o.Token = slog.New(slog.NewTextHandler(b.log, nil)), token
	var err error
	if b.server, err = rpc.NewServer(o); err != nil {
		t.Fatal(err)
	}
	storagev1.RegisterEventServiceServer(b.server, e)
	storagev1.RegisterArtifactServiceServer(b.server, artifacts{})
	addr, err := b.server.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.address = addr.String()
	b.server.SetServing()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.server.Run(ctx) }()
	b.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() { _ = b.stop() })
	return b
}

// each runs the test over TCP and in memory.
func each(t *testing.T, b *bundle, test func(t *testing.T, conn grpc.ClientConnInterface)) {
	t.Helper()
	d := rpc.NewDialer(rpc.DialerOptions{Local: b.server, Hosted: []string{"storage"}, Token: token})
	t.Cleanup(func() { _ = d.Close() })
	t.Run("memory", func(t *testing.T) {
		conn, err := d.Conn("storage")
		if err != nil {
			t.Fatal(err)
		}
		test(t, conn)
	})
	t.Run("tcp", func(t *testing.T) {
		conn, err := d.Dial(b.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		test(t, conn)
	})
}

func TestCallsAndErrors(t *testing.T) {
	t.Parallel()
	results := map[string]error{
		"":                           nil,
		"EVENTS_GONE":                rpcerr.New(codes.NotFound, "EVENTS_GONE", "gone"),
		rpcerr.ReasonInternal:        errors.New("secret detail"),
		rpcerr.ReasonUnauthenticated: rpc.ErrUnauthenticated,
	}
	var result atomic.Pointer[error]
	b := setup(t, &events{list: func(context.Context) error { return *result.Load() }}, rpc.ServerOptions{})
	each(t, b, func(t *testing.T, conn grpc.ClientConnInterface) {
		for reason, err := range results {
			result.Store(&err)
			_, got := storagev1.NewEventServiceClient(conn).ListEvents(t.Context(), &storagev1.ListEventsRequest{})
			if rpcerr.Reason(got) != reason || (got == nil) != (err == nil) {
				t.Errorf("%v became %v", err, got)
			}
		}
	})
	if !strings.Contains(b.log.String(), "secret detail") {
		t.Error("the detail of an unknown error is not in the log")
	}
}

func TestToken(t *testing.T) {
	t.Parallel()
	b := setup(t, &events{list: ok, tail: ok}, rpc.ServerOptions{})
	for _, bad := range []string{"", "wrong", token + "x"} {
		conn, err := rpc.NewDialer(rpc.DialerOptions{Token: bad}).Dial(b.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		client := storagev1.NewEventServiceClient(conn)
		if _, err := client.ListEvents(t.Context(), &storagev1.ListEventsRequest{}); rpcerr.Reason(err) != rpcerr.ReasonUnauthenticated {
			t.Errorf("token %q, unary: %v", bad, err)
		}
		tail, err := client.TailEvents(t.Context(), &storagev1.TailEventsRequest{})
		if err == nil {
			_, err = tail.Recv()
		}
		if rpcerr.Code(err) != codes.Unauthenticated {
			t.Errorf("token %q, stream: %v", bad, err)
		}
		h, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: "rollout.storage.v1.EventService"})
		if err != nil || h.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("health without the token: %v %v", h, err)
		}
	}
}

func TestValidationGivesEveryViolation(t *testing.T) {
	t.Parallel()
	b := setup(t, &events{list: ok}, rpc.ServerOptions{})
	each(t, b, func(t *testing.T, conn grpc.ClientConnInterface) {
		_, err := storagev1.NewEventServiceClient(conn).AppendEvents(t.Context(), &storagev1.AppendEventsRequest{
			Events: []*eventv1.Event{{Time: timestamppb.Now(), Service: "x", Kind: "log"}, {EventId: "1", Service: "x", Kind: "LOG"}},
		})
		e, _ := rpcerr.From(err)
		var paths []string
		for _, v := range e.Violations() {
			paths = append(paths, v.Path)
		}
		if rpcerr.Reason(err) != rpcerr.ReasonInvalidRequest || !slices.Equal(paths, []string{"events[0].event_id", "events[1].time", "events[1].kind"}) {
			t.Errorf("%v: %v", err, paths)
		}
		if !strings.Contains(err.Error(), "events[0].event_id") {
			t.Errorf("the message names no field: %v", err)
		}
	})
}

func TestEachMessageOfAStreamIsValidated(t *testing.T) {
	t.Parallel()
	b := setup(t, &events{}, rpc.ServerOptions{})
	each(t, b, func(t *testing.T, conn grpc.ClientConnInterface) {
		for size, code := range map[int]codes.Code{1 << 20: codes.OK, 1<<20 + 1: codes.InvalidArgument} {
			put, err := storagev1.NewArtifactServiceClient(conn).PutArtifact(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range []int{1, size} {
				if err := put.Send(&storagev1.PutArtifactRequest{Chunk: make([]byte, n)}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := put.CloseAndRecv(); rpcerr.Code(err) != code {
				t.Errorf("a chunk of %d bytes: %v", size, err)
			}
		}
	})
}

func TestPanicIsCaught(t *testing.T) {
	t.Parallel()
	boom := func(context.Context) error { panic("boom") }
	b := setup(t, &events{list: boom, tail: boom}, rpc.ServerOptions{})
	each(t, b, func(t *testing.T, conn grpc.ClientConnInterface) {
		client := storagev1.NewEventServiceClient(conn)
		if _, err := client.ListEvents(t.Context(), &storagev1.ListEventsRequest{}); rpcerr.Reason(err) != rpcerr.ReasonPanic {
			t.Errorf("unary: %v", err)
		}
		tail, err := client.TailEvents(t.Context(), &storagev1.TailEventsRequest{})
		for err == nil {
			_, err = tail.Recv()
		}
		if rpcerr.Reason(err) != rpcerr.ReasonPanic || strings.Contains(err.Error(), "boom") {
			t.Errorf("stream: %v", err)
		}
	})
	if !strings.Contains(b.log.String(), "boom") || !strings.Contains(b.log.String(), "rpc_test.go") {
		t.Error("the log lacks the panic or its stack")
	}
}

func TestDrainLetsACallEndAndTellsAStream(t *testing.T) {
	t.Parallel()
	started, release := make(chan struct{}, 2), make(chan struct{})
	b := setup(t, &events{
		list: func(context.Context) error { started <- struct{}{}; <-release; return nil },
		tail: func(ctx context.Context) error { started <- struct{}{}; <-ctx.Done(); close(release); return ctx.Err() },
	}, rpc.ServerOptions{Drain: 4 * time.Second})
	conn, err := rpc.NewDialer(rpc.DialerOptions{Token: token}).Dial(b.address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := storagev1.NewEventServiceClient(conn)
	listed := make(chan error, 1)
	go func() {
		_, err := client.ListEvents(t.Context(), &storagev1.ListEventsRequest{})
		listed <- err
	}()
	tail, err := client.TailEvents(t.Context(), &storagev1.TailEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	<-started
	<-started
	if _, err := tail.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := b.stop(); err != nil {
		t.Error(err)
	}
	if err := <-listed; err != nil {
		t.Errorf("the call in flight: %v", err)
	}
	if _, err := tail.Recv(); rpcerr.Reason(err) != rpcerr.ReasonDraining {
		t.Errorf("the stream: %v", err)
	}
}

func TestDrainCutsOffWhatDoesNotEnd(t *testing.T) {
	t.Parallel()
	started, release := make(chan struct{}), make(chan struct{})
	defer close(release)
	b := setup(t, &events{list: func(context.Context) error { close(started); <-release; return nil }}, rpc.ServerOptions{Drain: 50 * time.Millisecond})
	conn, err := rpc.NewDialer(rpc.DialerOptions{Token: token}).Dial(b.address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	listed := make(chan error, 1)
	go func() {
		_, err := storagev1.NewEventServiceClient(conn).ListEvents(t.Context(), &storagev1.ListEventsRequest{}, grpc.WaitForReady(false))
		listed <- err
	}()
	<-started
	stopped := make(chan error, 1)
	go func() { stopped <- b.stop() }()
	if err := <-listed; rpcerr.Code(err) != codes.Unavailable {
		t.Errorf("the call that was cut off: %v", err)
	}
}

// A restarted worker gets another address, so a call to its old address must not wait.
func TestCallOfADeadAddressFailsAtOnce(t *testing.T) {
	t.Parallel()
	b := setup(t, &events{list: ok}, rpc.ServerOptions{})
	d := rpc.NewDialer(rpc.DialerOptions{Token: token})
	conn, err := d.Dial(b.address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := storagev1.NewEventServiceClient(conn)
	if _, err := client.ListEvents(t.Context(), &storagev1.ListEventsRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := b.stop(); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		func() error { _, err := client.ListEvents(t.Context(), &storagev1.ListEventsRequest{}); return err }(),
		func() error { _, err := client.AppendEvents(t.Context(), &storagev1.AppendEventsRequest{}); return err }(),
	} {
		if rpcerr.Code(err) != codes.Unavailable {
			t.Errorf("got %v", err)
		}
	}
}

func TestNoRoute(t *testing.T) {
	t.Parallel()
	d := rpc.NewDialer(rpc.DialerOptions{})
	if _, err := d.Conn("buffer"); !errors.Is(err, rpc.ErrNoRoute) {
		t.Errorf("got %v", err)
	}
}

func TestTokenFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "token")
	if _, err := rpc.ReadToken(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	var wg sync.WaitGroup
	tokens := make([]string, 8)
	for i := range tokens {
		wg.Go(func() {
			var err error
			if tokens[i], err = rpc.EnsureToken(path); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, got := range tokens {
		if got != tokens[0] || len(got) != 64 {
			t.Errorf("tokens %q and %q", tokens[0], got)
		}
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := rpc.ReadToken(path); !errors.Is(err, rpc.ErrTokenFile) {
		t.Errorf("readable by all: %v", err)
	}
	if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, []byte("a b\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := rpc.ReadToken(path); !errors.Is(err, rpc.ErrTokenFile) {
		t.Errorf("two words: %v", err)
	}
}
