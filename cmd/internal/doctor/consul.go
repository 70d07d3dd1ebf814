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

// consul registers and deregisters a service.
func consul(ctx context.Context, p Input, r *report) {
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
			"check that the agent is running, and consul.address; for an HTTPS agent it begins with https://"))
		return
	}
	r.ok("reach", "")
	least(r, "Consul", version, 1, 10)
	if leader == "" {
		r.fail("leader", errors.New("the cluster has no leader"), "see `consul operator raft list-peers`; a majority of the servers must be running")
		return
	}
	r.ok("leader", "elected")
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
		r.fail("permissions", errors.New("a deregistered service stays in the catalog, so lookups find a process that has exited"),
			"give the agent its own token, with node:write and service:write (acl.tokens.agent; `consul acl set-agent-token agent TOKEN`)")
		return
	}
	r.ok("permissions", "registers and deregisters")
}

const (
	goneWithin = 2 * time.Second // less than the TTL of a registration
	gonePoll   = 50 * time.Millisecond
)

// gone reports whether an instance is no longer in the catalog. The agent removes services with its
// own token.
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

// token returns the token of the control plane; "" if it does not exist yet.
func token(p Input) (string, error) {
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
