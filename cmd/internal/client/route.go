package client

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// route connects to a service in another process, which it looks up at the first call.
type route struct {
	c       *Client
	service string
}

// Invoke makes a call.
func (r route) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	conn, err := r.find(ctx)
	if err != nil {
		return err
	}
	err = conn.Invoke(ctx, method, args, reply, opts...)
	r.forget(conn, err)
	return err
}

// NewStream begins a stream.
func (r route) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	conn, err := r.find(ctx)
	if err != nil {
		return nil, err
	}
	stream, err := conn.NewStream(ctx, desc, method, opts...)
	r.forget(conn, err)
	return stream, err
}

// forget makes the next call look up the service again if this one failed because its process is
// unavailable: another process may have taken over.
func (r route) forget(conn *grpc.ClientConn, err error) {
	if status.Code(err) != codes.Unavailable {
		return
	}
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if r.c.found[r.service] == conn {
		delete(r.c.found, r.service)
	}
}

func (r route) find(ctx context.Context) (*grpc.ClientConn, error) {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if conn := r.c.found[r.service]; conn != nil {
		return conn, nil
	}
	address, err := lookup(ctx, r.c.options, r.c.token, r.service)
	if err != nil {
		reason := ReasonNotFound
		if errors.Is(err, errRegistry) {
			reason = ReasonRegistry
		}
		return nil, rpcerr.New(codes.Unavailable, reason, "look up %s in Consul %s: %v", r.service, r.c.options.Consul, err)
	}
	conn := r.c.conns[address]
	if conn == nil {
		if conn, err = r.c.dial(address); err != nil {
			return nil, err
		}
		r.c.conns[address] = conn
	}
	r.c.found[r.service] = conn
	return conn, nil
}

// ReasonNotFound is the reason of a call to a service of which no instance is registered and
// healthy.
const ReasonNotFound = "SERVICE_NOT_FOUND"

// ReasonRegistry is the reason of a call to a service that could not be looked up, because the
// Consul agent does not answer.
const ReasonRegistry = "REGISTRY_UNREACHABLE"

var errRegistry = errors.New("the agent does not answer")

// lookup returns the address of a passing instance of a service. Of several it is the one with the
// highest epoch, which is the leader: a killed one passes until its TTL ends.
func lookup(ctx context.Context, o Options, token, service string) (string, error) {
	found, err := instances(ctx, o, token, service)
	if err != nil {
		return "", err
	}
	if len(found) == 0 {
		return "", errors.New("no instance is passing its health check")
	}
	return slices.MaxFunc(found, func(a, b instance) int { return cmp.Compare(a.epoch, b.epoch) }).address, nil
}

// instance is a process in which a service is registered.
type instance struct {
	address string
	epoch   uint64 // of a leader; else 0
}

// instances asks a Consul agent, or the embedded registry, for the passing instances of a service.
// With the mesh token it ignores registrations that no service of the control plane made; an API
// key is too little to tell them apart.
// API: https://developer.hashicorp.com/consul/api-docs/health#list-service-instances-for-service
func instances(ctx context.Context, o Options, token, service string) ([]instance, error) {
	ctx, cancel := context.WithTimeout(ctx, reachable)
	defer cancel()
	scheme, agent, cut := strings.Cut(o.Consul, "://")
	if !cut {
		scheme, agent = "http", o.Consul
	}
	place := url.URL{Scheme: scheme, Host: agent, Path: "/v1/health/service/" + service, RawQuery: "passing=1"}
	response, err := ask(ctx, place.String(), cmp.Or(o.ACL, token), o)
	if err == nil && response.StatusCode == http.StatusForbidden && o.ACL != "" { // the ACL token may be for another agent
		response.Body.Close()
		response, err = ask(ctx, place.String(), token, o)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errRegistry, err)
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusForbidden {
		return nil, fmt.Errorf("it returned %s; set CONSUL_HTTP_TOKEN to a token with service:read and node:read", response.Status)
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("it returned %s", response.Status)
	}
	var entries []struct {
		Node    struct{ Address string }
		Service struct {
			ID      string
			Address string
			Port    int
			Meta    map[string]string
		}
	}
	if err := json.NewDecoder(response.Body).Decode(&entries); err != nil {
		return nil, fmt.Errorf("read its response: %w", err)
	}
	var found []instance
	for _, e := range entries {
		address := net.JoinHostPort(cmp.Or(e.Service.Address, e.Node.Address), strconv.Itoa(e.Service.Port))
		if o.Key == "" && !discovery.NewSeal(token).Authentic(discovery.Instance{Name: service, ID: e.Service.ID, Address: address, Meta: e.Service.Meta}) {
			continue
		}
		epoch, _ := strconv.ParseUint(e.Service.Meta[discovery.MetaEpoch], 10, 64) // 0 without one
		found = append(found, instance{address, epoch})
	}
	return found, nil
}

func ask(ctx context.Context, place, token string, o Options) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, place, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("X-Consul-Token", token)
	transport := &http.Transport{DisableKeepAlives: true, TLSClientConfig: o.TLS.Clone()} // without a proxy
	return (&http.Client{Transport: transport}).Do(request)
}
