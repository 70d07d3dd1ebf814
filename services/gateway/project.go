package gateway

import (
	"context"

	"github.com/rollout-rl/rollout/libs/apikey"
)

// projectStore is a Store in which a key finds the sessions and responses of its project only.
type projectStore struct {
	Store
	projects *apikey.Projects
}

// Session implements SessionStore.
func (s projectStore) Session(ctx context.Context, name string, from int) (*Session, error) {
	found, err := s.Store.Session(ctx, name, from)
	if err != nil {
		return nil, err
	}
	sees, err := s.projects.Sees(ctx, found.GetRunId())
	if err != nil {
		return nil, err
	}
	if !sees {
		return nil, NoSession(name)
	}
	return found, nil
}

// Response implements ResponseStore.
func (s projectStore) Response(ctx context.Context, id string) (*Response, error) {
	found, err := s.Store.Response(ctx, id)
	if err != nil {
		return nil, err
	}
	if _, limited := apikey.ProjectOf(ctx); !limited {
		return found, nil
	}
	if _, err := s.Session(ctx, found.Session, 0); err != nil {
		return nil, NoResponse(id)
	}
	return found, nil
}

// DeleteResponse implements ResponseStore.
func (s projectStore) DeleteResponse(ctx context.Context, id string) error {
	if _, err := s.Response(ctx, id); err != nil {
		return err
	}
	return s.Store.DeleteResponse(ctx, id)
}
