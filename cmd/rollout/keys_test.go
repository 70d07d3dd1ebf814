package main

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/libs/apikey"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
)

// fakeKeys is the service of the gateway, in memory.
type fakeKeys struct {
	keyv1.UnimplementedApiKeyServiceServer
	now  *time.Time
	list []*apikey.Record
}

func (f *fakeKeys) Register(r grpc.ServiceRegistrar) { keyv1.RegisterApiKeyServiceServer(r, f) }

func (f *fakeKeys) CreateApiKey(_ context.Context, req *keyv1.CreateApiKeyRequest) (*keyv1.CreateApiKeyResponse, error) {
	record := &apikey.Record{
		Name: req.GetName(), Scope: req.GetScope(), Expires: req.GetExpires(), RequestsPerMinute: req.GetRequestsPerMinute(), TokensPerMinute: req.GetTokensPerMinute(),
	}
	key, err := apikey.New(record, *f.now)
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(f.list, func(r *apikey.Record) bool { return r.GetName() == req.GetName() }) {
		return nil, apikey.ErrExists.WithMessage("there is a key of the name %s", req.GetName())
	}
	f.list = append(f.list, record)
	return &keyv1.CreateApiKeyResponse{Key: key}, nil
}

// ListApiKeys returns pages of one key. The first one was used a minute after it was created.
func (f *fakeKeys) ListApiKeys(_ context.Context, req *keyv1.ListApiKeysRequest) (*keyv1.ListApiKeysResponse, error) {
	at := 0
	if req.GetPageToken() != "" {
		at = 1 + slices.IndexFunc(f.list, func(r *apikey.Record) bool { return r.GetName() == req.GetPageToken() })
	}
	if at >= len(f.list) {
		return &keyv1.ListApiKeysResponse{}, nil
	}
	if at == 0 {
		f.list[0].LastUsed = timestamppb.New(f.list[0].GetCreated().AsTime().Add(time.Minute))
	}
	return &keyv1.ListApiKeysResponse{Keys: f.list[at : at+1], NextPageToken: f.list[at].GetName()}, nil
}

func (f *fakeKeys) RevokeApiKey(_ context.Context, req *keyv1.RevokeApiKeyRequest) (*keyv1.RevokeApiKeyResponse, error) {
	before := len(f.list)
	f.list = slices.DeleteFunc(f.list, func(r *apikey.Record) bool { return r.GetName() == req.GetName() })
	if len(f.list) == before {
		return nil, apikey.ErrMissing.WithMessage("no key is named %s", req.GetName())
	}
	return &keyv1.RevokeApiKeyResponse{}, nil
}

// TestKeys runs the commands in order, a day apart. Only `create` prints a key.
func TestKeys(t *testing.T) {
	t.Parallel()
	for _, format := range []string{cli.FormatText, cli.FormatJSON} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			now := noon
			c := call{plane: newPlane(t, &fakeKeys{now: &now}), now: func() time.Time { return now }}
			var log strings.Builder
			var secrets []string
			run := func(line string) {
				t.Helper()
				args := strings.Fields(line)
				if format == cli.FormatJSON {
					args = append(args, "--format", "json")
				}
				got := c.run(t, append([]string{"keys"}, args...)...)
				for _, secret := range secrets {
					if strings.Contains(got.text(), secret) {
						t.Errorf("`keys %s` tells a key again:\n%s", line, got.text())
					}
				}
				text := got.text()
				if got.code == 0 && strings.HasPrefix(line, "create") {
					secret := created(t, format, got.stdout)
					secrets = append(secrets, secret)
					text = strings.ReplaceAll(text, secret, "KEY")
				}
				log.WriteString("$ rollout keys " + line + "\n" + text)
				now = now.Add(24 * time.Hour)
			}
			run("list")
			run("create ada --scope submit")
			run("create ci")
			run("create ada --scope admin")
			run("create bob --scope root")
			run("create Not-A-Name!")
			run("create")
			run("create agent --scope session --expires 720h --requests-per-minute 600")
			run("create bot --tokens-per-minute -1")
			run("list")
			run("revoke ada")
			run("revoke ada")
			run("list")
			golden(t, "testdata/keys."+format, log.String())
		})
	}
}

// created is the key that `create` printed.
func created(t *testing.T, format, stdout string) string {
	t.Helper()
	if format == cli.FormatText {
		return strings.TrimSpace(stdout)
	}
	var made struct{ Key string }
	if err := json.Unmarshal([]byte(stdout), &made); err != nil || made.Key == "" {
		t.Fatalf("no key in %q: %v", stdout, err)
	}
	return made.Key
}
