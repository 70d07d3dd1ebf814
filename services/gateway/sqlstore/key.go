package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/sqldb"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
)

// insertKey adds a key, unless there is one with its name or hash.
const insertKey = `INSERT INTO api_key (name, sha256, scope, project, created_ms, expires_ms, used_ms, requests_per_minute, tokens_per_minute)
	VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT DO NOTHING`

// AddKeys implements gateway.KeyStore.
func (s *Store) AddKeys(ctx context.Context, keys []*apikey.Record) (added int, err error) {
	err = s.changeKeys(ctx, func(tx *sql.Tx) (changed int64, err error) {
		added = 0
		for _, k := range keys {
			result, err := tx.ExecContext(ctx, insertKey, k.GetName(), k.GetSha256(), k.GetScope(), k.GetProject(), milliseconds(k.GetCreated()),
				milliseconds(k.GetExpires()), milliseconds(k.GetLastUsed()), k.GetRequestsPerMinute(), k.GetTokensPerMinute())
			if err != nil {
				return 0, err
			}
			n, err := result.RowsAffected()
			if err != nil {
				return 0, err
			}
			added += int(n)
		}
		return int64(added), nil
	})
	if err != nil {
		return 0, fmt.Errorf("store API keys: %w", err)
	}
	return added, nil
}

// RemoveKey implements gateway.KeyStore.
func (s *Store) RemoveKey(ctx context.Context, name string) (removed bool, err error) {
	n, err := s.deleteKeys(ctx, `DELETE FROM api_key WHERE name = $1`, name)
	if err != nil {
		return false, fmt.Errorf("revoke the API key %s: %w", name, err)
	}
	return n > 0, nil
}

// ExpireKeys implements gateway.KeyStore.
func (s *Store) ExpireKeys(ctx context.Context, before time.Time) (removed int, err error) {
	n, err := s.deleteKeys(ctx, `DELETE FROM api_key WHERE expires_ms > 0 AND expires_ms < $1`, before.UnixMilli())
	if err != nil {
		return 0, fmt.Errorf("delete expired API keys: %w", err)
	}
	return int(n), nil
}

func (s *Store) deleteKeys(ctx context.Context, statement string, arg any) (deleted int64, err error) {
	err = s.changeKeys(ctx, func(tx *sql.Tx) (int64, error) {
		result, err := tx.ExecContext(ctx, statement, arg)
		if err != nil {
			return 0, err
		}
		deleted, err = result.RowsAffected()
		return deleted, err
	})
	return deleted, err
}

// changeKeys runs a change, and raises the revision if it changed anything.
func (s *Store) changeKeys(ctx context.Context, change func(tx *sql.Tx) (changed int64, err error)) error {
	return s.db.Tx(ctx, func(tx *sql.Tx) error {
		n, err := change(tx)
		if err != nil || n == 0 {
			return err
		}
		_, err = tx.ExecContext(ctx, `UPDATE api_key_revision SET revision = revision + 1`)
		return err
	})
}

// Keys implements gateway.KeyStore.
func (s *Store) Keys(ctx context.Context, known int64) (revision int64, keys []*apikey.Record, err error) {
	err = s.db.One(ctx, `SELECT revision FROM api_key_revision`, nil, &revision)
	if err == nil && revision != known {
		err = s.db.View(ctx, func(tx *sql.Tx) error {
			if err := tx.QueryRowContext(ctx, `SELECT revision FROM api_key_revision`).Scan(&revision); err != nil {
				return err
			}
			keys, err = readKeys(ctx, tx, selectKeys+`ORDER BY name`)
			return err
		})
	}
	if err != nil {
		return 0, nil, fmt.Errorf("read API keys: %w", err)
	}
	return revision, keys, nil
}

// ListKeys implements gateway.KeyStore.
func (s *Store) ListKeys(ctx context.Context, after string, limit int) (keys []*apikey.Record, err error) {
	err = s.db.View(ctx, func(tx *sql.Tx) error {
		keys, err = readKeys(ctx, tx, selectKeys+`WHERE name > $1 ORDER BY name LIMIT $2`, sqldb.Text(after), limit)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list API keys: %w", err)
	}
	return keys, nil
}

const selectKeys = `SELECT name, sha256, scope, project, created_ms, expires_ms, used_ms, requests_per_minute, tokens_per_minute FROM api_key `

func readKeys(ctx context.Context, tx *sql.Tx, query string, args ...any) (keys []*apikey.Record, err error) {
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		k := &apikey.Record{}
		var created, expires, used int64
		if err := rows.Scan(&k.Name, &k.Sha256, &k.Scope, &k.Project, &created, &expires, &used, &k.RequestsPerMinute, &k.TokensPerMinute); err != nil {
			return nil, err
		}
		k.Created, k.Expires, k.LastUsed = instant(created), instant(expires), instant(used)
		keys = append(keys, k)
	}
	return keys, rows.Err()
}

// UseKeys implements gateway.KeyStore.
func (s *Store) UseKeys(ctx context.Context, used []*keyv1.ApiKeyUse) error {
	used = slices.SortedFunc(slices.Values(used), func(a, b *keyv1.ApiKeyUse) int { return cmp.Compare(a.GetSha256(), b.GetSha256()) }) // all lock the rows in this order
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		for _, u := range used {
			if _, err := tx.ExecContext(ctx, `UPDATE api_key SET used_ms = $2 WHERE sha256 = $1 AND used_ms < $2`, u.GetSha256(), milliseconds(u.GetTime())); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("store when API keys were used: %w", err)
	}
	return nil
}

// milliseconds returns a time as it is stored; 0: none.
func milliseconds(t *timestamppb.Timestamp) int64 {
	if t == nil {
		return 0
	}
	return t.AsTime().UnixMilli()
}

func instant(ms int64) *timestamppb.Timestamp {
	if ms == 0 {
		return nil
	}
	return timestamppb.New(time.UnixMilli(ms).UTC())
}
