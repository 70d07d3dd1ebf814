package discovery_test

import (
	"encoding/json"
	"net"
	"os"
	"strconv"
	"testing"

	"github.com/rollout-rl/rollout/libs/discovery"
)

// Go and Python accept the same registrations; python/tests/worker/test_seal.py reads the file too.
func TestVectorsOfRegistrations(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../schemas/golden/registration.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Token     string
		PublicKey string `json:"public_key"`
		Cases     []struct {
			Case              string
			Authentic         bool
			Name, ID, Address string
			Port              int
			Meta              map[string]string
		}
	}
	if err := json.Unmarshal(text, &golden); err != nil {
		t.Fatal(err)
	}
	seal := discovery.NewSeal(golden.Token)
	if seal.Public() != golden.PublicKey {
		t.Errorf("public key %s", seal.Public())
	}
	for _, c := range golden.Cases {
		if got := seal.Authentic(discovery.Instance{Name: c.Name, ID: c.ID, Address: net.JoinHostPort(c.Address, strconv.Itoa(c.Port)), Meta: c.Meta}); got != c.Authentic {
			t.Errorf("%s: authentic is %v", c.Case, got)
		}
	}
}
