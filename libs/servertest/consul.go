package servertest

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"testing"
)

// ConsulOptions has the settings of an agent.
type ConsulOptions struct {
	Token string // the management token; "" turns access control off
	// Durable keeps registrations in files: they are there again after Kill and Start. Without it a
	// restarted agent is empty.
	Durable bool
}

// Consul is one agent in server mode, its own cluster.
type Consul struct {
	*Process
	Address string // host:port of the HTTP API
}

// StartConsul starts an agent.
func StartConsul(t testing.TB, o ConsulOptions) *Consul {
	t.Helper()
	ports := freePorts(t, 4)
	c := &Consul{Address: local(ports[0])}
	args := []string{
		"agent", "-server", "-bind=127.0.0.1", "-client=127.0.0.1", "-log-level=warn", "-node=test",
		"-http-port=" + strconv.Itoa(ports[0]), "-server-port=" + strconv.Itoa(ports[1]), "-serf-lan-port=" + strconv.Itoa(ports[2]),
		"-serf-wan-port=-1", "-dns-port=-1", "-grpc-port=-1", "-grpc-tls-port=-1",
		"-hcl", `performance { raft_multiplier = 1 } disable_update_check = true enable_debug = false`,
	}
	if o.Durable {
		args = append(args, "-bootstrap-expect=1", "-data-dir="+t.TempDir())
	} else {
		args = append(args, "-dev")
	}
	if o.Token != "" {
		args = append(args, "-hcl", fmt.Sprintf(`acl { enabled = true default_policy = "deny" down_policy = "extend-cache" `+
			`tokens { initial_management = %q agent = %q } }`, o.Token, o.Token))
	}
	c.Process = start(t, "consul", args, nil, func() error { return c.leads(o.Token) })
	return c
}

// leads reports whether the agent has a leader and takes registrations.
func (c *Consul) leads(token string) error {
	for _, path := range []string{"/v1/catalog/nodes", "/v1/agent/self"} {
		req, err := http.NewRequest(http.MethodGet, "http://"+c.Address+path, nil)
		if err != nil {
			return err
		}
		req.Header.Set("X-Consul-Token", token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK || len(body) < 3 { // "[]" while its own node is not in the catalog
			return fmt.Errorf("%s: HTTP %d %s", path, resp.StatusCode, body)
		}
	}
	return nil
}
