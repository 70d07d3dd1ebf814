package rpc_test

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/apikey/apikeytest"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// A key allows the calls of its scope. Other calls fail with a fix, and a revoked key is refused.
func TestAPIKeys(t *testing.T) {
	t.Parallel()
	keys := apikeytest.New(t)
	b := setup(t, &events{list: ok, tail: ok}, rpc.ServerOptions{Keys: keys.Ring})
	for _, scope := range []apikey.Scope{apikey.Read, apikey.Submit, apikey.Admin} {
		key := keys.Create(t, &apikey.Record{Name: string(scope), Scope: string(scope)}, time.Now())
		conn, err := rpc.NewDialer(rpc.DialerOptions{Token: key}).DialWorker(b.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		list := func() error {
			_, err := storagev1.NewEventServiceClient(conn).ListEvents(t.Context(), &storagev1.ListEventsRequest{})
			return err
		}
		put := func() error {
			s, err := storagev1.NewArtifactServiceClient(conn).PutArtifact(t.Context())
			if err != nil {
				return err
			}
			_, err = s.CloseAndRecv()
			return err
		}
		if err := list(); err != nil {
			t.Errorf("%s lists: %v", scope, err)
		}
		if err := put(); scope == apikey.Read && (rpcerr.Code(err) != codes.PermissionDenied || rpcerr.Reason(err) != "SCOPE_INSUFFICIENT" || rpcerr.Fix(err) == "") ||
			scope != apikey.Read && err != nil {
			t.Errorf("%s puts: %v", scope, err)
		}
		_, err = storagev1.NewEventServiceClient(conn).AppendEvents(t.Context(), &storagev1.AppendEventsRequest{})
		if rpcerr.Reason(err) != "SCOPE_INSUFFICIENT" {
			t.Errorf("%s does what only the mesh may: %v", scope, err)
		}
		keys.Revoke(string(scope))
		for deadline := time.Now().Add(10 * time.Second); list() == nil && time.Now().Before(deadline); {
			<-time.After(50 * time.Millisecond)
		}
		if err := list(); rpcerr.Reason(err) != rpcerr.ReasonUnauthenticated {
			t.Errorf("%s after it was revoked: %v", scope, err)
		}
	}
}
