// Package discovery finds services and workers: one client (Consul's own) for a real Consul and for
// the registry embedded in rolloutd (package registry), and a gRPC resolver for addresses like
// "consul:///buffer".
package discovery

import (
	"cmp"
	"maps"
	"net"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Errors of this package, compared with errors.Is.
var (
	ErrUnavailable = rpcerr.New(codes.Unavailable, "DISCOVERY_UNAVAILABLE", "the Consul agent does not answer").RetryAfter(time.Second)
	ErrDenied      = rpcerr.New(codes.PermissionDenied, "DISCOVERY_DENIED", "the Consul agent refused the token").
			Fix("name one with service:write and node:read by consul.token, as \"env:CONSUL_HTTP_TOKEN\"; no CONSUL_* variable counts unless it is named")
	ErrService = rpcerr.New(codes.InvalidArgument, "DISCOVERY_SERVICE", "a registration needs name, id, address, port and TTL")
)

// DefaultTTL is how long a registration is valid without a renewal. It is renewed three times as
// often.
const DefaultTTL = 3 * time.Second

// DefaultReap is how long a registration stays visible as critical before it is removed. Consul
// itself takes a minute at least.
const DefaultReap = 30 * time.Second

// Service is a registration of a process.
type Service struct {
	Name    string            // "buffer", "inference-worker"
	ID      string            // unique; a second registration of the same id replaces the first
	Address string            // host that peers dial
	Port    int               // gRPC port
	Tags    []string          // may be nil
	Meta    map[string]string // may be nil
	TTL     time.Duration     // 0 is DefaultTTL
	Reap    time.Duration     // 0 is DefaultReap
}

// Instance is a registered, passing service.
type Instance struct {
	Name    string
	ID      string
	Address string // host:port
	Tags    []string
	Meta    map[string]string
}

func (s Service) check() error {
	if s.Name == "" || s.ID == "" || s.Address == "" || s.Port <= 0 || s.TTL < 0 {
		return ErrService.With("name", s.Name).With("id", s.ID).With("address", net.JoinHostPort(s.Address, strconv.Itoa(s.Port)))
	}
	return nil
}

// equal reports whether two sorted lists of instances say the same.
func equal(a, b []Instance) bool {
	return slices.EqualFunc(a, b, func(x, y Instance) bool {
		return x.ID == y.ID && x.Address == y.Address && slices.Equal(x.Tags, y.Tags) && maps.Equal(x.Meta, y.Meta)
	})
}

func sortByID(list []Instance) {
	slices.SortFunc(list, func(a, b Instance) int { return cmp.Compare(a.ID, b.ID) })
}
