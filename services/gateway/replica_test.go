package gateway_test

import (
	"context"
	"net"
	"net/http"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/sqldb"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
	"github.com/rollout-rl/rollout/services/gateway"
	"github.com/rollout-rl/rollout/services/gateway/sqlstore"
)

// replica is a gateway that shares its database with others, and a client of its gRPC services.
type replica struct {
	*gateway.Server
	keys keyv1.ApiKeyServiceClient
}

// newReplica runs a gateway as a process does: it checks keys with a ring that reads them over
// gRPC.
func newReplica(t *testing.T, place sqldb.Place) *replica {
	t.Helper()
	store, err := sqlstore.Open(t.Context(), place)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	listener := bufconn.Listen(1 << 20)
	conn, err := grpc.NewClient("passthrough:///memory", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	internal := keyv1.NewApiKeyInternalServiceClient(conn)
	ring := apikey.NewRing(func(ctx context.Context, req *keyv1.SyncApiKeysRequest) (*keyv1.SyncApiKeysResponse, error) {
		return internal.SyncApiKeys(ctx, req)
	}, nil)
	s, _, _ := runWith(t, gateway.Config{Keys: ring}, &ledger{}, func(d *gateway.Deps) { d.Store, d.Now = store, time.Now }, &fakeWorker{model: "tiny"})
	server := grpc.NewServer()
	s.Register(server)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{}, 2)
	go func() { _ = server.Serve(listener); done <- struct{}{} }()
	go func() { _ = ring.Run(ctx); done <- struct{}{} }()
	t.Cleanup(func() {
		cancel()
		_ = conn.Close()
		server.Stop()
		<-done
		<-done
	})
	return &replica{Server: s, keys: keyv1.NewApiKeyServiceClient(conn)}
}

func (r *replica) complete(t *testing.T, key string) int {
	t.Helper()
	resp, _ := do(t, r.Server, http.MethodPost, "/v1/completions", `{"model":"tiny","prompt":"a"}`, key)
	return resp.StatusCode
}

// A key that is created on one gateway works on another one at once. A revoked one is refused by
// all of them. Each gateway counts its limit alone.
func TestReplicasShareKeys(t *testing.T) {
	t.Parallel()
	folder := sqldb.Files(t.TempDir())
	a, b := newReplica(t, folder), newReplica(t, folder)
	create := func(req *keyv1.CreateApiKeyRequest) string {
		t.Helper()
		made, err := a.keys.CreateApiKey(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		return made.GetKey()
	}
	ada := create(&keyv1.CreateApiKeyRequest{Name: "ada", Scope: "sample", Expires: timestamppb.New(time.Now().Add(time.Hour))})
	few := create(&keyv1.CreateApiKeyRequest{Name: "few", Scope: "session", RequestsPerMinute: 1})
	if _, err := b.keys.CreateApiKey(t.Context(), &keyv1.CreateApiKeyRequest{Name: "ada", Scope: "read"}); err == nil {
		t.Errorf("a second key of the name: %v", err)
	}
	for _, c := range []struct {
		at   *replica
		key  string
		want int
	}{{b, ada, 200}, {a, ada, 200}, {a, few, 200}, {a, few, 429}, {b, few, 200}, {b, few, 429}, {b, "rk-unknown", 401}} {
		if got := c.at.complete(t, c.key); got != c.want {
			t.Errorf("%d, want %d", got, c.want)
		}
	}
	page, err := b.keys.ListApiKeys(t.Context(), &keyv1.ListApiKeysRequest{PageSize: 1})
	if err != nil || len(page.GetKeys()) != 1 || page.GetKeys()[0].GetName() != "ada" || page.GetKeys()[0].GetSha256() != "" || page.GetKeys()[0].GetExpires() == nil || page.GetNextPageToken() != "ada" {
		t.Errorf("the first page: %v, %v", page, err)
	}
	if _, err := b.keys.RevokeApiKey(t.Context(), &keyv1.RevokeApiKeyRequest{Name: "ada"}); err != nil {
		t.Fatal(err)
	}
	if _, err := a.keys.RevokeApiKey(t.Context(), &keyv1.RevokeApiKeyRequest{Name: "ada"}); err == nil {
		t.Error("a key was revoked twice")
	}
	for _, at := range []*replica{a, b} {
		for deadline := time.Now().Add(time.Minute); at.complete(t, ada) != 401; {
			if time.Now().After(deadline) {
				t.Fatal("a revoked key is accepted for a minute")
			}
			<-time.After(50 * time.Millisecond)
		}
	}
	page, err = a.keys.ListApiKeys(t.Context(), &keyv1.ListApiKeysRequest{})
	if err != nil || len(page.GetKeys()) != 1 || page.GetKeys()[0].GetLastUsed() == nil {
		t.Errorf("the last page: %v, %v", page, err)
	}
}
