// Package sqldb opens the SQL database of a service, migrates its schema, and runs transactions. It
// does not depend on any table.
//
// A database is a SQLite file or a schema of PostgreSQL. The same statements run on both, with
// placeholders $1, $2, ... and a few functions of this package (ForUpdate, Among, ...) where the
// two differ. A store is written once, for *DB; its test suite runs on both.
package sqldb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
)

// Durability says which failures a commit survives.
type Durability string

const (
	// Full: a commit that returned survives a power cut (one fsync each).
	Full Durability = "FULL"
	// Normal: a commit survives the death of the process; a power cut may take the last ones, never
	// the consistency.
	Normal Durability = "NORMAL"
)

// Place is the location of the databases of all services.
type Place interface {
	// Open opens or makes the database of a service ("buffer").
	Open(ctx context.Context, service string, d Durability) (*DB, error)
}

// Files is a folder of SQLite files, one a service.
type Files string

// Open implements Place.
func (f Files) Open(_ context.Context, service string, d Durability) (*DB, error) {
	return OpenSQLite(filepath.Join(string(f), service+".sqlite"), d)
}

// DB is one database. Its methods may be called from many goroutines.
type DB struct {
	Dialect
	write    *sql.DB
	read     *sql.DB // for SQLite read-only; for PostgreSQL the same pool
	postgres *server // nil: SQLite
	fence    Fence

	path     string // of the SQLite file
	readOnly bool   // SQLite only: opened without writing
}

// Fence is called at the start of each write transaction, and refuses it by returning an error; see
// Fenced.
type Fence func(ctx context.Context, tx *sql.Tx) error

// Fenced is the same database whose write transactions are refused unless fence lets them pass.
func (db *DB) Fenced(fence Fence) *DB {
	fenced := *db
	fenced.fence = fence
	return &fenced
}

// Close closes the database, for every copy that Fenced made.
func (db *DB) Close() error {
	if db.read == db.write {
		return db.write.Close()
	}
	return errors.Join(db.read.Close(), db.write.Close())
}

// Prepared is a statement that may be used in transactions, see Prepare.
type Prepared struct{ read, write *sql.Stmt }

// Prepare parses a statement once a connection. For PostgreSQL, whose driver remembers statements
// by itself, it is nil.
func (db *DB) Prepare(ctx context.Context, text string) (*Prepared, error) {
	if db.Postgres() {
		return nil, nil
	}
	read, err := db.read.PrepareContext(ctx, text)
	if err != nil {
		return nil, fmt.Errorf("prepare %q: %w", text, err)
	}
	write, err := db.write.PrepareContext(ctx, text)
	if err != nil {
		return nil, fmt.Errorf("prepare %q: %w", text, err)
	}
	return &Prepared{read, write}, nil
}

// In is the statement for a write transaction or for a View.
func (p *Prepared) In(writes bool) *sql.Stmt {
	if writes {
		return p.write
	}
	return p.read
}
