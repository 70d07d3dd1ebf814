// Package rpc has the gRPC servers and clients of this project.
//
// A Server listens on TCP and in memory, with the same interceptors. A Dialer returns the in-memory
// connection for a service that is hosted in this process, and "consul:///NAME" for other services.
// Callers do not need to know which.
package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc/filters"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/test/bufconn"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

const (
	// MaxMessage bounds a message both ways, in bytes. Larger things are streamed.
	MaxMessage = 64 << 20
	// inMemoryBuffer is the buffer size of an in-memory connection, in bytes.
	inMemoryBuffer = 1 << 20
	// A sender may be so far ahead of us, in bytes of a call and of its connection. HTTP/2's own 64
	// KiB are less than a request of four small puts, which then waits for a round trip in its middle;
	// windows that gRPC finds by itself cost a ping for what arrives: two packets for each token of a
	// completion.
	callWindow       = 4 << 20
	connectionWindow = 8 << 20
	defaultDrain     = 10 * time.Second
)

// ErrDraining ends a stream that is still open after half of the drain time.
var ErrDraining = rpcerr.New(codes.Unavailable, rpcerr.ReasonDraining, "the server is going away").RetryAfter(time.Second)

// ServerOptions has the settings of a Server.
type ServerOptions struct {
	Log   *slog.Logger // nil discards
	Token string       // the token that every call except health needs; "": none
	Keys  *apikey.Ring // keys that are accepted instead, within their scope; nil: none
	// Workers decides which credentials of workers are accepted; nil: by signature and expiry
	Workers *credential.Authority
	// Projects decides which runs a key sees; nil: all
	Projects *apikey.Projects
	TLS      *cert.Source  // of the TCP listener; nil: plain text, for loopback
	Drain    time.Duration // how long running calls may take during the drain; 0: 10 s. Streams end after half of it
}

// Server is one gRPC server on two listeners. It is a grpc.ServiceRegistrar: register services
// before Run.
type Server struct {
	grpc   *grpc.Server
	health *health.Server
	memory *bufconn.Listener
	auth   authenticator
	log    *slog.Logger
	drain  time.Duration

	draining   context.Context // ends when streams are to end
	endStreams context.CancelCauseFunc
	mu         sync.Mutex
	tcp        net.Listener
	registered []string
}

// NewServer makes a server with health and reflection and without a TCP listener yet. Health
// answers NOT_SERVING until SetServing.
func NewServer(o ServerOptions) (*Server, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Drain == 0 {
		o.Drain = defaultDrain
	}
	validate, err := newValidator()
	if err != nil {
		return nil, fmt.Errorf("make rpc server: %w", err)
	}
	if o.Workers == nil {
		o.Workers = credential.NewAuthority(o.Token, nil)
	}
	auth, guard := authenticator{token: o.Token, keys: o.Keys, workers: o.Workers}, guard{o.Projects}
	s := &Server{health: health.NewServer(), memory: bufconn.Listen(inMemoryBuffer), auth: auth, log: o.Log, drain: o.Drain}
	s.draining, s.endStreams = context.WithCancelCause(context.Background())
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxSendMsgSize(MaxMessage),
		grpc.InitialWindowSize(callWindow),
		grpc.InitialConnWindowSize(connectionWindow),
		grpc.StatsHandler(otelgrpc.NewServerHandler(otelgrpc.WithFilter(filters.Not(filters.HealthCheck())))),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: keepaliveTime / 2, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}),
		// Outermost first: errors of all the others are mapped, a panic anywhere below is caught,
		// unauthenticated calls go no further. Unary calls are authenticated before, see RegisterService.
		grpc.ChainUnaryInterceptor(rpcerr.Unary(o.Log), recoverUnary(o.Log), validate.unary, guard.unary),
		grpc.ChainStreamInterceptor(s.drainStream, rpcerr.Stream(o.Log), recoverStream(o.Log), auth.stream, validate.stream, guard.stream),
	}
	if o.TLS != nil {
		options = append(options, grpc.Creds(Credentials(o.TLS, o.Log)))
	}
	s.grpc = grpc.NewServer(options...)
	healthpb.RegisterHealthServer(s.grpc, s.health)
	reflection.Register(s.grpc)
	s.health.SetServingStatus("", healthpb.HealthCheckResponse_NOT_SERVING)
	return s, nil
}

// RegisterService implements grpc.ServiceRegistrar. The service is NOT_SERVING under its proto name
// until SetServing.
//
// A call is authenticated when its headers have arrived. gRPC reads and decodes the request of a
// unary call before it calls an interceptor, so that the handlers of unary methods are wrapped:
// the request of a refused caller is not read.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, impl any) {
	guarded := *desc
	guarded.Methods = slices.Clone(desc.Methods)
	for i, m := range desc.Methods {
		name := "/" + desc.ServiceName + "/" + m.MethodName
		guarded.Methods[i].Handler = func(srv any, ctx context.Context, decode func(any) error, next grpc.UnaryServerInterceptor) (any, error) {
			ctx, err := s.auth.check(ctx, name)
			if err != nil {
				return nil, rpcerr.Edge(ctx, s.log, name, err)
			}
			return m.Handler(srv, ctx, decode, next)
		}
	}
	s.grpc.RegisterService(&guarded, impl)
	s.health.SetServingStatus(desc.ServiceName, healthpb.HealthCheckResponse_NOT_SERVING)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.registered = append(s.registered, desc.ServiceName)
}

// SetServing makes health answer SERVING, for the process and each of its services.
func (s *Server) SetServing() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range append([]string{""}, s.registered...) {
		s.health.SetServingStatus(name, healthpb.HealthCheckResponse_SERVING)
	}
}

// Listen takes a TCP address, "127.0.0.1:0" for a free port, and returns it. Calls wait until Run.
func (s *Server) Listen(ctx context.Context, address string) (*net.TCPAddr, error) {
	lis, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen for gRPC on %s: %w", address, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tcp = lis
	return lis.Addr().(*net.TCPAddr), nil
}

// Run serves until ctx ends, then drains: it refuses new calls, running calls may finish within the
// drain time, and streams within half of it. Remaining calls are cut off. It returns when both
// listeners are closed.
func (s *Server) Run(ctx context.Context) error {
	s.mu.Lock()
	listeners := []net.Listener{s.memory}
	if s.tcp != nil {
		listeners = append(listeners, s.tcp)
	}
	s.mu.Unlock()
	served := make(chan error, len(listeners))
	for _, lis := range listeners {
		go func() { served <- s.grpc.Serve(lis) }()
	}
	var errs []error
	left := len(listeners)
	select {
	case <-ctx.Done():
	case err := <-served:
		errs = append(errs, err)
		left--
	}
	s.stop()
	for range left {
		errs = append(errs, <-served)
	}
	for i, err := range errs {
		if errors.Is(err, grpc.ErrServerStopped) {
			errs[i] = nil
		}
	}
	return errors.Join(errs...)
}

func (s *Server) stop() {
	s.health.Shutdown() // notify watchers of health first
	half := time.AfterFunc(s.drain/2, func() { s.endStreams(ErrDraining) })
	defer half.Stop()
	hard := time.AfterFunc(s.drain, func() {
		s.log.Warn("calls were still running when the drain time ended; they are cut off", "drain", s.drain)
		s.grpc.Stop()
	})
	defer hard.Stop()
	s.grpc.GracefulStop()
}

// drainStream ends a stream's context with ErrDraining after half of the drain time, so that an
// endless stream does not delay the drain.
func (s *Server) drainStream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	ctx, cancel := context.WithCancelCause(ss.Context())
	defer cancel(nil)
	defer context.AfterFunc(s.draining, func() { cancel(context.Cause(s.draining)) })()
	return next(srv, &stream{ServerStream: ss, ctx: ctx})
}

// stream is a ServerStream with another context.
type stream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *stream) Context() context.Context { return s.ctx }
