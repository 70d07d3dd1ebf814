package rpc_test

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// The credential of a worker permits the calls of its role about its run, and nothing else.
func TestAWorkerMakesTheCallsOfItsRole(t *testing.T) {
	t.Parallel()
	b := setup(t, &events{list: ok, tail: ok}, rpc.ServerOptions{})
	for role, want := range map[string]struct{ tail, other, list, put codes.Code }{
		"sinks":         {codes.OK, codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied},
		"inference":     {codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied, codes.OK},
		credential.Peer: {codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied, codes.PermissionDenied},
	} {
		conn, err := rpc.NewDialer(rpc.DialerOptions{Token: credential.Issue(token, credential.For("run-1", role, 1, time.Now()))}).Dial(b.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		c := storagev1.NewEventServiceClient(conn)
		tail := func(run string) codes.Code {
			s, err := c.TailEvents(t.Context(), &storagev1.TailEventsRequest{Filter: &storagev1.EventFilter{RunId: run}})
			if err == nil {
				_, err = s.Recv()
			}
			return rpcerr.Code(err)
		}
		_, listed := c.ListEvents(t.Context(), &storagev1.ListEventsRequest{})
		s, err := storagev1.NewArtifactServiceClient(conn).PutArtifact(t.Context())
		if err == nil {
			_, err = s.CloseAndRecv()
		}
		if got := tail("run-1"); got != want.tail {
			t.Errorf("%s tails its run: %v", role, got)
		}
		if all, other := tail(""), tail("run-2"); other != want.other || all != want.other {
			t.Errorf("%s tails another run: %v, all runs: %v", role, other, all)
		}
		if rpcerr.Code(listed) != want.list {
			t.Errorf("%s lists: %v", role, listed)
		}
		if rpcerr.Code(err) != want.put {
			t.Errorf("%s puts: %v", role, err)
		}
	}
}

// A credential that has expired, or whose incarnation was replaced, permits nothing. A worker
// retries after the first, because the scheduler renews it.
func TestACredentialThatIsNotInForceIsRefused(t *testing.T) {
	t.Parallel()
	authority := credential.NewAuthority(token, nil)
	authority.Follow(func(context.Context, string) (credential.Standing, error) {
		return credential.Standing{Incarnation: 2}, nil
	})
	b := setup(t, &events{list: ok, tail: ok}, rpc.ServerOptions{Workers: authority})
	now := time.Now()
	for name, c := range map[string]struct {
		claims credential.Claims
		code   codes.Code
		reason string
	}{
		"in force": {credential.For("run-1", "inference", 2, now), codes.OK, ""},
		"expired":  {credential.For("run-1", "inference", 2, now.Add(-2*credential.Lifetime)), codes.Unavailable, "CREDENTIAL_EXPIRED"},
		"replaced": {credential.For("run-1", "inference", 1, now), codes.Unauthenticated, "CREDENTIAL_REVOKED"},
	} {
		conn, err := rpc.NewDialer(rpc.DialerOptions{Token: credential.Issue(token, c.claims)}).Dial(b.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		s, err := storagev1.NewArtifactServiceClient(conn).PutArtifact(t.Context())
		if err == nil {
			_, err = s.CloseAndRecv()
		}
		if rpcerr.Code(err) != c.code || c.reason != "" && rpcerr.Reason(err) != c.reason {
			t.Errorf("%s: %v", name, err)
		}
	}
}
