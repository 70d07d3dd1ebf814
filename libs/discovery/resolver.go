package discovery

import (
	"context"
	"fmt"
	"net"
	"sync"

	"google.golang.org/grpc/resolver"
)

// Scheme is the scheme of gRPC targets that this package resolves: "consul:///buffer".
const Scheme = "consul"

// Resolver is a gRPC resolver builder for Scheme, to be given to grpc.WithResolvers. An empty list
// of instances makes calls that wait for ready wait, and others fail with Unavailable.
func (c *Client) Resolver() resolver.Builder { return &builder{c} }

type builder struct{ client *Client }

func (b *builder) Scheme() string { return Scheme }

// Build starts the watch of one service; Close of the result ends it.
func (b *builder) Build(target resolver.Target, cc resolver.ClientConn, _ resolver.BuildOptions) (resolver.Resolver, error) {
	name := target.Endpoint()
	if name == "" {
		return nil, fmt.Errorf("target %q names no service; write %s:///NAME", target.URL.String(), Scheme)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w := &watchResolver{cancel: cancel}
	w.wg.Go(func() {
		b.client.watch(ctx, name, func(list []Instance) {
			state := resolver.State{}
			for _, i := range leading(list) {
				// With TLS it is the host of the instance that its certificate names, not the service.
				host, _, err := net.SplitHostPort(i.Address)
				if err != nil {
					continue
				}
				state.Addresses = append(state.Addresses, resolver.Address{Addr: i.Address, ServerName: host})
			}
			_ = cc.UpdateState(state) // refused if the list is empty; the balancer then fails waiting calls
		})
	})
	return w, nil
}

type watchResolver struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// ResolveNow does nothing, because the watch receives changes at once.
func (w *watchResolver) ResolveNow(resolver.ResolveNowOptions) {}

// Close ends the watch and waits for it.
func (w *watchResolver) Close() {
	w.cancel()
	w.wg.Wait()
}
