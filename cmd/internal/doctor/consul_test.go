package doctor

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/discovery/registry"
)

// An agent with ACLs but without its own token reports a deregistration, and the catalog still has
// the service.
func TestAnAgentThatCannotDeregister(t *testing.T) {
	t.Parallel()
	for _, keeps := range []bool{false, true} {
		r := registry.New("")
		handler := r.Handler()
		agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if keeps && strings.HasPrefix(req.URL.Path, "/v1/agent/service/deregister/") {
				return
			}
			handler.ServeHTTP(w, req)
		}))
		t.Cleanup(func() { r.Close(); agent.Close() })
		c := config.Default(t.TempDir())
		c.Consul.Address = agent.URL
		var found report
		consul(t.Context(), Input{Config: c, Now: time.Now}, &found)
		last := found.list[len(found.list)-1]
		if last.Check != "permissions" || (last.Status == Failed) != keeps || strings.Contains(last.Fix, "acl.tokens.agent") != keeps {
			t.Errorf("keeps %t: %+v", keeps, found.list)
		}
	}
}
