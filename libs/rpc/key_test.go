package rpc_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

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
		conn, err := rpc.NewDialer(rpc.DialerOptions{Token: key}).Dial(b.address)
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

// The calls of a key about a run of another project are answered with NOT_FOUND, also those that
// another process makes for it.
func TestAKeyReachesItsProjectOnly(t *testing.T) {
	t.Parallel()
	keys := apikeytest.New(t)
	projects := apikey.NewProjects(func(_ context.Context, run string) (string, error) {
		return map[string]string{"run-1": "math"}[run], nil
	})
	var caller string
	seen := func(ctx context.Context) error { caller = apikey.From(ctx).GetName(); return nil }
	b := setup(t, &events{list: seen, tail: seen}, rpc.ServerOptions{Keys: keys.Ring, Projects: projects})
	filter := func(run string) *storagev1.EventFilter { return &storagev1.EventFilter{RunId: run} }
	check := func(name string, ctx context.Context, conn grpc.ClientConnInterface) {
		c := storagev1.NewEventServiceClient(conn)
		for run, want := range map[string]codes.Code{"run-1": codes.OK, "run-2": codes.NotFound, "": codes.OK} {
			if _, err := c.ListEvents(ctx, &storagev1.ListEventsRequest{Filter: filter(run)}); rpcerr.Code(err) != want {
				t.Errorf("%s lists %q: %v", name, run, err)
			}
			if _, err := c.QueryMetrics(ctx, &storagev1.QueryMetricsRequest{RunId: "run-2"}); rpcerr.Reason(err) != "RUN_NOT_FOUND" {
				t.Errorf("%s asks for metrics: %v", name, err)
			}
			tail, err := c.TailEvents(ctx, &storagev1.TailEventsRequest{Filter: filter(run)})
			for err == nil {
				_, err = tail.Recv()
			}
			if errors.Is(err, io.EOF) {
				err = nil
			}
			if rpcerr.Code(err) != want {
				t.Errorf("%s tails %q: %v", name, run, err)
			}
		}
		if caller != "ada" {
			t.Errorf("%s: the caller is %q", name, caller)
		}
	}
	ada := &apikey.Record{Name: "ada", Scope: "read", Project: "math"}
	direct, err := rpc.NewDialer(rpc.DialerOptions{Token: keys.Create(t, ada, time.Now())}).Dial(b.address)
	if err != nil {
		t.Fatal(err)
	}
	defer direct.Close()
	check("the key", t.Context(), direct)
	service := rpc.NewDialer(rpc.DialerOptions{Local: b.server, Hosted: []string{"storage"}, Token: token})
	defer service.Close()
	conn, err := service.Conn("storage")
	if err != nil {
		t.Fatal(err)
	}
	check("a service for the key", apikey.With(t.Context(), ada), conn)
	if _, err := storagev1.NewEventServiceClient(conn).ListEvents(t.Context(), &storagev1.ListEventsRequest{Filter: filter("run-2")}); err != nil {
		t.Errorf("a service for itself: %v", err)
	}
	forged := metadata.AppendToOutgoingContext(t.Context(), "rollout-caller-bin", "")
	if _, err := storagev1.NewEventServiceClient(direct).ListEvents(forged, &storagev1.ListEventsRequest{Filter: filter("run-2")}); rpcerr.Code(err) != codes.NotFound {
		t.Errorf("a key that claims another caller: %v", err)
	}
}
