package credential_test

import (
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/credential"
)

func TestACredentialIsValidForItsClaimsAlone(t *testing.T) {
	t.Parallel()
	claims := credential.For("run-1", "learner", 3, time.Unix(1_000_000, 0))
	issued := credential.Issue("mesh", claims)
	if got, ok := credential.Verify("mesh", issued); !ok || got != claims {
		t.Fatalf("%+v, %v", got, ok)
	}
	endless := claims
	endless.Expires = 0
	for name, forged := range map[string]string{
		"run": strings.Replace(issued, "run-1", "run-2", 1), "role": strings.Replace(issued, "learner", "peer", 1), "signature": issued[:len(issued)-1],
		"incarnation": strings.Replace(issued, ".3.", ".4.", 1), "expiry": strings.Replace(issued, ".100", ".200", 1), "spelling": strings.Replace(issued, ".3.", ".03.", 1),
		"another mesh": credential.Issue("other", claims), "none": "", "mesh token": "mesh", "no run": credential.Issue("mesh", credential.Claims{Role: "learner", Expires: 1}),
		"no expiry": credential.Issue("mesh", endless), "no fields": "rw-.", "no signature": "rw-" + claims.String(),
	} {
		if got, ok := credential.Verify("mesh", forged); ok {
			t.Errorf("another %s was accepted: %+v", name, got)
		}
	}
	if _, ok := credential.Verify("", credential.Issue("", claims)); ok {
		t.Error("a credential was accepted without a mesh token")
	}
}

func TestACredentialIsDueAtHalfOfItsLifetime(t *testing.T) {
	t.Parallel()
	made := time.Unix(1_000_000, 0)
	c := credential.For("run-1", "learner", 1, made)
	for after, due := range map[time.Duration]bool{0: false, credential.Lifetime/2 - time.Second: false, credential.Lifetime / 2: true, 100 * credential.Lifetime: true, -credential.Lifetime: false} {
		if c.Due(made.Add(after)) != due {
			t.Errorf("after %v: due is %v", after, !due)
		}
	}
	if credential.For("run-1", credential.Peer, 1, made).Due(made.Add(100 * credential.Lifetime)) {
		t.Error("a token of peers is due, although it does not expire")
	}
}

// rollout_testing computes the same peer token (python/rollout_testing/credential.py).
func TestVector(t *testing.T) {
	t.Parallel()
	const want = "rw-run-1.peer.2.0.3aabc5fb90c150ba9abfda89fd722c0f4614f4a6e1c9364a4ff4179d28359ea7"
	if got := credential.Issue("mesh", credential.Claims{Run: "run-1", Role: credential.Peer, Incarnation: 2}); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
