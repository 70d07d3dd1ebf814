package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/rollout-rl/rollout/services/gateway"
)

// KeepResponse implements gateway.ResponseStore.
func (s *Store) KeepResponse(ctx context.Context, r *gateway.Response) error {
	_, err := s.db.Exec(ctx, `INSERT INTO response (response_id, session_id, response, input_items) VALUES ($1, $2, $3, $4)
		ON CONFLICT (response_id) DO NOTHING`, r.ID, r.Session, r.Body, r.Input)
	if err != nil {
		return fmt.Errorf("store response %s: %w", r.ID, err)
	}
	return nil
}

// Response implements gateway.ResponseStore.
func (s *Store) Response(ctx context.Context, id string) (*gateway.Response, error) {
	r := &gateway.Response{ID: id}
	err := s.db.One(ctx, `SELECT session_id, response, input_items FROM response WHERE response_id = $1`, []any{id}, &r.Session, &r.Body, &r.Input)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, gateway.NoResponse(id)
	}
	if err != nil {
		return nil, fmt.Errorf("read response %s: %w", id, err)
	}
	return r, nil
}

// DeleteResponse implements gateway.ResponseStore.
func (s *Store) DeleteResponse(ctx context.Context, id string) error {
	n, err := s.db.Exec(ctx, `DELETE FROM response WHERE response_id = $1`, id)
	if err != nil {
		return fmt.Errorf("delete response %s: %w", id, err)
	}
	if n == 0 {
		return gateway.NoResponse(id)
	}
	return nil
}
