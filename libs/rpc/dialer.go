package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc/filters"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"

	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

const (
	keepaliveTime    = 10 * time.Second // a peer that vanished without a FIN is detected after keepaliveTime + keepaliveTimeout
	keepaliveTimeout = 5 * time.Second
	// workerKeepalive is for peers with other gRPC servers: by default, servers in other languages
	// disconnect a client that pings more often than every five minutes. The death of a worker is
	// detected earlier: on this host by the kernel, elsewhere by its registration, which expires after
	// seconds.
	workerKeepalive = 6 * time.Minute
	// stallAfter is how long a call waits for a service before that is logged.
	stallAfter = 15 * time.Second
)

// ErrNoRoute means that a service is neither hosted here nor registered.
var ErrNoRoute = rpcerr.New(codes.Unavailable, "RPC_NO_ROUTE",
	"the service is not hosted in this process and no discovery is configured")

// DialerOptions says how a Dialer finds services.
type DialerOptions struct {
	Local  *Server          // serves the Hosted services; nil if there are none
	Hosted []string         // names of the targets in this process
	Lookup resolver.Builder // with scheme "consul", see discovery.Client.Resolver; nil: only hosted services
	Token  string           // added to each call
	TLS    *cert.Source     // for connections to other processes; nil: plain text
	Log    *slog.Logger     // nil discards
}

// Dialer gives connections to services by name. One connection a service, made lazily, for the life
// of the Dialer. Its methods may be called from many goroutines.
type Dialer struct {
	o     DialerOptions
	mu    sync.Mutex
	conns map[string]*grpc.ClientConn
}

// NewDialer makes a Dialer; it dials nothing yet.
func NewDialer(o DialerOptions) *Dialer {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Dialer{o: o, conns: map[string]*grpc.ClientConn{}}
}

// Conn returns the connection to a service: in memory if it is hosted here, through discovery
// otherwise. Its calls wait until the service is available, so give them a deadline or a context
// that ends. Do not close it. Conn returns ErrNoRoute.
func (d *Dialer) Conn(service string) (grpc.ClientConnInterface, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if conn := d.conns[service]; conn != nil {
		return conn, nil
	}
	conn, err := d.dial(service)
	if err != nil {
		return nil, fmt.Errorf("dial service %s: %w", service, err)
	}
	d.conns[service] = conn
	return conn, nil
}

func (d *Dialer) dial(service string) (*grpc.ClientConn, error) {
	if d.o.Local != nil && slices.Contains(d.o.Hosted, service) {
		memory := d.o.Local.memory
		return grpc.NewClient("passthrough:///"+service, append(clientOptions(d.o.Token, nil, d.o.Log, true),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return memory.DialContext(ctx) }))...)
	}
	if d.o.Lookup == nil {
		return nil, ErrNoRoute.With("service", service)
	}
	f := newFollower()
	return grpc.NewClient("consul:///"+service, append(clientOptions(d.o.Token, d.o.TLS, d.o.Log, true),
		grpc.WithResolvers(watched{d.o.Lookup, f}), grpc.WithChainUnaryInterceptor(f.unary), grpc.WithChainStreamInterceptor(f.stream),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: keepaliveTime, Timeout: keepaliveTimeout, PermitWithoutStream: true,
		}))...)
}

// DialWorker is a connection to the address (host:port) of a worker of a run, or of a served model.
// Its calls carry the token that the workers of this incarnation accept, never the mesh token. The
// caller closes it. Calls fail at once with Unavailable if no process listens. Workers on this host
// are called in plain text unless the mesh's TLS is mutual: then every worker has a certificate.
func (d *Dialer) DialWorker(run string, incarnation uint32, address string) (*grpc.ClientConn, error) {
	return d.dialAddress(credential.Issue(d.o.Token, credential.Claims{Run: run, Role: credential.Peer, Incarnation: incarnation}), address)
}

// Dial is a connection to the address (host:port) of one server, with the token of the Dialer. The
// caller closes it. Otherwise it is like DialWorker.
func (d *Dialer) Dial(address string) (*grpc.ClientConn, error) {
	return d.dialAddress(d.o.Token, address)
}

func (d *Dialer) dialAddress(token, address string) (*grpc.ClientConn, error) {
	t := d.o.TLS
	if t != nil && !t.Mutual() && loopback(address) {
		t = nil
	}
	options := clientOptions(token, t, d.o.Log, false)
	if !loopback(address) {
		options = append(options, grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: workerKeepalive, Timeout: keepaliveTimeout}))
	}
	conn, err := grpc.NewClient("passthrough:///"+address, options...)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", address, err)
	}
	return conn, nil
}

func loopback(address string) bool {
	ap, err := netip.ParseAddrPort(address)
	return err == nil && ap.Addr().IsLoopback()
}

// Close closes every connection that Conn made.
func (d *Dialer) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for name, conn := range d.conns {
		errs = append(errs, conn.Close())
		delete(d.conns, name)
	}
	return errors.Join(errs...)
}

func clientOptions(token string, t *cert.Source, log *slog.Logger, service bool) []grpc.DialOption {
	transport := insecure.NewCredentials()
	if t != nil {
		transport = Credentials(t, log)
	}
	return []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithPerRPCCredentials(perCall{token, service}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)),
		grpc.WithInitialWindowSize(callWindow),
		grpc.WithInitialConnWindowSize(connectionWindow),
		grpc.WithDefaultServiceConfig(serviceConfig(service)),
		grpc.WithDisableServiceConfig(), // no other comes from a resolver
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithFilter(filters.Not(filters.HealthCheck())))),
		grpc.WithChainUnaryInterceptor(explainStall(log)),
		grpc.WithIdleTimeout(0), // there are few connections, and they stay open until the process ends
	}
}

// explainStall logs a unary call that takes long, with what its connection does: a stall explains
// itself.
func explainStall(log *slog.Logger) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		timer := time.AfterFunc(stallAfter, func() {
			log.Warn("a call takes long", "method", method, "target", cc.Target(), "connection", cc.GetState().String(), "after", stallAfter)
		})
		defer timer.Stop()
		return invoke(ctx, method, req, reply, cc, opts...)
	}
}
