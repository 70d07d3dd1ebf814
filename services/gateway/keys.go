package gateway

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/paging"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
)

// keys is the gRPC edge of the API keys: to manage them, and for the processes that check them.
type keys struct {
	keyv1.UnimplementedApiKeyServiceServer
	keyv1.UnimplementedApiKeyInternalServiceServer
	store KeyStore
	now   func() time.Time
}

// CreateApiKey implements the contract.
func (k *keys) CreateApiKey(ctx context.Context, req *keyv1.CreateApiKeyRequest) (*keyv1.CreateApiKeyResponse, error) {
	project, err := apikey.ProjectFor(ctx, req.GetProject())
	if err != nil {
		return nil, err
	}
	record := &apikey.Record{
		Name: req.GetName(), Scope: req.GetScope(), Project: project, RequestsPerMinute: req.GetRequestsPerMinute(), TokensPerMinute: req.GetTokensPerMinute(),
	}
	if req.GetExpires() != nil {
		record.Expires = timestamppb.New(req.GetExpires().AsTime().Truncate(time.Second))
	}
	key, err := apikey.New(record, k.now())
	if err != nil {
		return nil, err
	}
	added, err := k.store.AddKeys(ctx, []*apikey.Record{record})
	if err != nil {
		return nil, err
	}
	if added == 0 {
		return nil, apikey.ErrExists.WithMessage("there is a key of the name %s", req.GetName())
	}
	return &keyv1.CreateApiKeyResponse{Key: key}, nil
}

// defaultKeys is the number of keys of a page.
const defaultKeys = 100

// ListApiKeys implements the contract.
func (k *keys) ListApiKeys(ctx context.Context, req *keyv1.ListApiKeysRequest) (*keyv1.ListApiKeysResponse, error) {
	if token := req.GetPageToken(); token != "" && !apikey.ValidName(token) {
		return nil, paging.ErrToken(token)
	}
	limit := paging.Size(req.GetPageSize(), defaultKeys)
	list, err := k.store.ListKeys(ctx, req.GetPageToken(), limit)
	if err != nil {
		return nil, err
	}
	resp := &keyv1.ListApiKeysResponse{}
	for _, record := range list {
		record.Sha256 = ""
		if project, limited := apikey.ProjectOf(ctx); !limited || record.GetProject() == project {
			resp.Keys = append(resp.Keys, record)
		}
	}
	if len(list) == limit {
		resp.NextPageToken = list[limit-1].GetName()
	}
	return resp, nil
}

// RevokeApiKey implements the contract.
func (k *keys) RevokeApiKey(ctx context.Context, req *keyv1.RevokeApiKeyRequest) (*keyv1.RevokeApiKeyResponse, error) {
	if err := k.own(ctx, req.GetName()); err != nil {
		return nil, err
	}
	removed, err := k.store.RemoveKey(ctx, req.GetName())
	if err != nil {
		return nil, err
	}
	if !removed {
		return nil, apikey.ErrMissing.WithMessage("no key is named %s", req.GetName())
	}
	return &keyv1.RevokeApiKeyResponse{}, nil
}

// own returns ErrMissing unless a key may manage the key of a name: those of its project.
func (k *keys) own(ctx context.Context, name string) error {
	project, limited := apikey.ProjectOf(ctx)
	if !limited {
		return nil
	}
	_, all, err := k.store.Keys(ctx, 0)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(all, func(r *apikey.Record) bool { return r.GetName() == name && r.GetProject() == project }) {
		return nil
	}
	return apikey.ErrMissing.WithMessage("no key is named %s", name)
}

// SyncApiKeys implements the contract.
func (k *keys) SyncApiKeys(ctx context.Context, req *keyv1.SyncApiKeysRequest) (*keyv1.SyncApiKeysResponse, error) {
	if len(req.GetUsed()) > 0 {
		if err := k.store.UseKeys(ctx, req.GetUsed()); err != nil {
			return nil, err
		}
	}
	revision, list, err := k.store.Keys(ctx, req.GetRevision())
	if err != nil {
		return nil, err
	}
	return &keyv1.SyncApiKeysResponse{Revision: revision, Keys: list}, nil
}
