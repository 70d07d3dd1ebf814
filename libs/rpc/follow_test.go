package rpc

import (
	"context"
	"errors"
	"net"
	"testing"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
)

// frozen takes calls and never answers.
type frozen struct {
	healthpb.UnimplementedHealthServer
	in chan struct{}
}

func (f *frozen) Check(ctx context.Context, _ *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	f.in <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

func (f *frozen) Watch(_ *healthpb.HealthCheckRequest, s grpc.ServerStreamingServer[healthpb.HealthCheckResponse]) error {
	if err := s.Send(&healthpb.HealthCheckResponse{}); err != nil {
		return err
	}
	f.in <- struct{}{}
	<-s.Context().Done()
	return s.Context().Err()
}

// Calls to a suspended process end when discovery names another, not before.
func TestCallsEndWhenTheServiceMoves(t *testing.T) {
	t.Parallel()
	serve := func(in chan struct{}) string {
		lis, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		healthpb.RegisterHealthServer(s, &frozen{in: in})
		go func() { _ = s.Serve(lis) }()
		t.Cleanup(s.Stop)
		return lis.Addr().String()
	}
	in := make(chan struct{}, 4)
	old, next := serve(in), serve(in)
	state := func(addresses ...string) resolver.State {
		var s resolver.State
		for _, a := range addresses {
			s.Addresses = append(s.Addresses, resolver.Address{Addr: a})
		}
		return s
	}
	lookup := manual.NewBuilderWithScheme("consul")
	lookup.InitialState(state(old))
	d := NewDialer(DialerOptions{Lookup: lookup})
	t.Cleanup(func() { d.Close() })
	conn, err := d.Conn("buffer")
	if err != nil {
		t.Fatal(err)
	}
	client := healthpb.NewHealthClient(conn)
	ended := make(chan error, 2)
	go func() {
		_, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{})
		ended <- err
	}()
	go func() {
		s, err := client.Watch(t.Context(), &healthpb.HealthCheckRequest{})
		for err == nil {
			_, err = s.Recv()
		}
		ended <- err
	}()
	<-in
	<-in
	lookup.UpdateState(state(old, next))
	lookup.UpdateState(state(old))
	lookup.UpdateState(state())
	select {
	case err := <-ended:
		t.Fatalf("a call ended while its process may still serve: %v", err)
	default:
	}
	lookup.UpdateState(state(next))
	for range 2 {
		if err := <-ended; !errors.Is(err, ErrMoved) {
			t.Errorf("a running call: %v", err)
		}
	}
}
