//go:build servers

package discovery_test

import (
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/discovery/discoverytest"
	"github.com/rollout-rl/rollout/libs/servertest"
)

func TestConsulConforms(t *testing.T) {
	t.Parallel()
	const management = "6f3c1d6e-0f53-4a86-9c0f-6d1f6a0c7a11"
	c := servertest.StartConsul(t, servertest.ConsulOptions{Token: management})
	// Consul reaps every 30 s, and only instances that were critical for a minute or more.
	discoverytest.Run(t, discoverytest.Agent{Address: c.Address, Token: management, Reap: time.Minute, ReapSlack: 90 * time.Second})
}

func TestConsulRestart(t *testing.T) {
	t.Parallel()
	for name, durable := range map[string]bool{"Empty": false, "Durable": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := servertest.StartConsul(t, servertest.ConsulOptions{Durable: durable})
			discoverytest.RunRestart(t, discoverytest.Restartable{
				Agent: discoverytest.Agent{Address: c.Address}, Stop: c.Kill, Start: c.Start,
			})
		})
	}
}
