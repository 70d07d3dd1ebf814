package backend

import (
	"path/filepath"
	"time"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/sqldb"
)

// Databases is where the services keep their state.
func Databases(cfg config.Config, environ []string) (sqldb.Place, error) {
	url, err := cfg.Database.Postgres(environ)
	if err != nil {
		return nil, err
	}
	if url == "" {
		return sqldb.Files(filepath.Join(cfg.StateDir, "db")), nil
	}
	return sqldb.Postgres{
		URL: url, Prefix: cfg.Database.SchemaPrefix, MaxConnections: cfg.Database.MaxConnections,
		StatementTimeout: time.Duration(cfg.Database.StatementTimeout) * time.Second,
	}, nil
}
