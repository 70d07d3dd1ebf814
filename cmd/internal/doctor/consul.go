package doctor

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/backend"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/rpc"
)

// consul registers a service and takes it away again.
func consul(ctx context.Context, p Patient, r *report) {
	c := p.Config.Consul
	if c.Address == "" {
		r.skip("reach", "the embedded registry")
		return
	}
	acl, err := c.Token.Read("consul.token", p.Environ)
	if err != nil {
		r.fail("configuration", err, "")
		return
	}
	t, err := backend.TLS("consul", c.CAFile, c.CertFile, c.KeyFile, nil)
	if err != nil {
		r.fail("configuration", err, "")
		return
	}
	client, err := discovery.NewClient(discovery.Options{Address: c.Address, Token: acl, TLS: t})
	if err != nil {
		r.fail("configuration", err, "write consul.address as host:8500 or https://host:8501")
		return
	}
	version, leader, err := client.Describe(ctx)
	if err != nil {
		r.fail("reach", err, fixOf(err, map[error]string{discovery.ErrDenied: "give the token of consul.token agent:read and node:read"},
			"is the agent up, and the host and port of consul.address right? An agent at https needs https:// there"))
		return
	}
	r.ok("reach", "")
	least(r, "Consul", version, 1, 10)
	if leader == "" {
		r.fail("leader", errors.New("the cluster has none"), "see `consul operator raft list-peers`; a majority of the servers must be up")
		return
	}
	r.ok("leader", "there is one")
	registering, cancel := context.WithCancel(ctx)
	name := "rollout-doctor"
	id := name + "-" + rand.Text()
	reg, err := client.Register(registering, discovery.Service{Name: name, ID: id, Address: "127.0.0.1", Port: 1})
	cancel()
	if err != nil {
		r.fail("permissions", err, `give the token: service_prefix "" { policy = "write" }, node_prefix "" { policy = "read" }`)
		return
	}
	reg.Wait()
	if !gone(ctx, client, name, id) {
		r.fail("permissions", errors.New("a service that was deregistered stays in the catalog: who looks it up finds a process that left"),
			"give the agent a token of its own, with node:write and service:write (acl.tokens.agent; `consul acl set-agent-token agent TOKEN`)")
		return
	}
	r.ok("permissions", "registers and deregisters")
}

const (
	goneWithin = 2 * time.Second // less than a registration's TTL, after which it does not pass any more
	gonePoll   = 50 * time.Millisecond
)

// gone reports whether an instance is not in the catalog any more: the agent takes services out with its own token, not ours.
func gone(ctx context.Context, client *discovery.Client, name, id string) bool {
	ctx, cancel := context.WithTimeout(ctx, goneWithin)
	defer cancel()
	tick := time.NewTicker(gonePoll)
	defer tick.Stop()
	for {
		if list, err := client.Lookup(ctx, name); err == nil && !slices.ContainsFunc(list, func(i discovery.Instance) bool { return i.ID == id }) {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
	}
}

// token is the mesh token, "" where there is none yet.
func token(p Patient) (string, error) {
	file := p.Config.TokenFile
	if file == "" {
		file = filepath.Join(p.Config.StateDir, "token")
	}
	text, err := rpc.ReadToken(file)
	if errors.Is(err, os.ErrNotExist) && p.Config.TokenFile == "" {
		return "", nil
	}
	return text, err
}
