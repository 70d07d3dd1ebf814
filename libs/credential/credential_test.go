package credential_test

import (
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/credential"
)

func TestACredentialIsValidForItsClaimsAlone(t *testing.T) {
	t.Parallel()
	issued := credential.Issue("mesh", credential.Claims{Run: "run-1", Role: "learner"})
	if got, ok := credential.Verify("mesh", issued); !ok || got != (credential.Claims{Run: "run-1", Role: "learner"}) {
		t.Fatalf("%+v, %v", got, ok)
	}
	for name, forged := range map[string]string{
		"run": strings.Replace(issued, "run-1", "run-2", 1), "role": strings.Replace(issued, "learner", "peer", 1), "signature": issued[:len(issued)-1],
		"another mesh": credential.Issue("other", credential.Claims{Run: "run-1", Role: "learner"}), "none": "", "mesh token": "mesh", "no run": credential.Issue("mesh", credential.Claims{Role: "learner"}),
	} {
		if got, ok := credential.Verify("mesh", forged); ok {
			t.Errorf("another %s was accepted: %+v", name, got)
		}
	}
	if _, ok := credential.Verify("", credential.Issue("", credential.Claims{Run: "run-1", Role: "learner"})); ok {
		t.Error("a credential was accepted without a mesh token")
	}
}

// rollout_testing computes the same peer token (python/rollout_testing/credential.py).
func TestVector(t *testing.T) {
	t.Parallel()
	const want = "rw-run-1.peer.54a29af1db6a3e1783d2edd9c401641f6cd25dc8566f31e278de93e9180a62f8"
	if got := credential.Issue("mesh", credential.Claims{Run: "run-1", Role: credential.Peer}); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
