package sqldb

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
)

const (
	// idleInTransaction is after how long the server rolls back the transaction of a suspended or
	// disconnected process, so that its locks do not outlive a lease.
	idleInTransaction = 2 * time.Second
	connectTimeout    = 5 * time.Second
	// connIdle is how long an unused connection is kept.
	connIdle = 5 * time.Minute
	oldest   = 140000 // server_version_num
)

// Postgres is a place in one PostgreSQL database: each service has its own schema and role there,
// both named PREFIX_SERVICE. The URL's user logs in and then is that role alone, so that one
// service can't touch what is another's.
//
// Both are made where they are missing, which the user must be allowed to (CREATEROLE, and CREATE
// on the database). Where it is not, and they do not exist yet, the error lists the statements to
// run.
type Postgres struct {
	URL              string // secret if it has a password
	Prefix           string // of schemas and roles: a-z, 0-9 and _
	MaxConnections   int    // of one service; 0 is 8
	StatementTimeout time.Duration
}

// server has the facts about a PostgreSQL server.
type server struct {
	login  pgx.ConnConfig // as the URL's user
	schema string
	prefix string // of the schemas of all services
	marks  marks
	locks  locks

	statement time.Duration // after which the server cancels a statement
}

// Schema is the name of a service's schema and role.
func (p Postgres) Schema(service string) string {
	return p.Prefix + "_" + strings.ReplaceAll(strings.TrimPrefix(service, "rollout-"), "-", "_")
}

// Open implements Place. ErrUnavailable, ErrDenied, ErrRole, ErrVersion.
func (p Postgres) Open(ctx context.Context, service string, d Durability) (*DB, error) {
	login, err := pgx.ParseConfig(p.URL)
	if err != nil {
		return nil, ErrURL // not err, which may repeat the URL
	}
	login.ConnectTimeout = connectTimeout
	login.RuntimeParams["application_name"] = "rollout " + service + " " + p.Schema(service)
	s := &server{login: *login.Copy(), schema: p.Schema(service), prefix: p.Prefix + "_", statement: p.StatementTimeout}
	if err := s.prepare(ctx); err != nil {
		return nil, fmt.Errorf("open the database of %s: %w", service, err)
	}
	pool := login.Copy()
	for name, value := range map[string]string{
		"role": s.schema, "search_path": s.schema, "timezone": "UTC",
		"statement_timeout":                   milliseconds(p.StatementTimeout),
		"idle_in_transaction_session_timeout": milliseconds(idleInTransaction),
		// The locks of a host that vanished are released after this time.
		"tcp_keepalives_idle": "5", "tcp_keepalives_interval": "1", "tcp_keepalives_count": "3",
	} {
		pool.RuntimeParams[name] = value
	}
	if d == Normal {
		pool.RuntimeParams["synchronous_commit"] = "off"
	}
	db := stdlib.OpenDB(*pool)
	conns := p.MaxConnections
	if conns == 0 {
		conns = 8
	}
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	db.SetConnMaxIdleTime(connIdle)
	if err := db.PingContext(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open the database of %s: %w", service, domain(err)), db.Close())
	}
	return &DB{Dialect: Dialect{postgresql: true}, write: db, read: db, postgres: s}, nil
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// locked runs fn with a connection of the URL's user while no other process is in locked for the
// same schema.
func (s *server) locked(ctx context.Context, fn func(conn *pgx.Conn) error) error {
	conn, err := pgx.ConnectConfig(ctx, &s.login)
	if err != nil {
		return domain(err)
	}
	defer func() { // the lock ends with the connection
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), connectTimeout)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock(hashtextextended($1, 0))", "rollout/"+s.schema); err != nil {
		return domain(err)
	}
	return fn(conn)
}

// prepare makes the role and the schema where they are missing.
func (s *server) prepare(ctx context.Context) error {
	return s.locked(ctx, func(conn *pgx.Conn) error {
		var version int
		if err := conn.QueryRow(ctx, "SELECT current_setting('server_version_num')::int").Scan(&version); err != nil {
			return domain(err)
		}
		if version < oldest {
			return ErrVersion.With("version", strconv.Itoa(version/10000))
		}
		var user, database string
		var role, member, schema, owned bool
		err := conn.QueryRow(ctx, `SELECT current_user, current_database(), r.oid IS NOT NULL,
				r.oid IS NOT NULL AND pg_has_role(current_user, r.oid, 'MEMBER'), n.oid IS NOT NULL,
				coalesce(has_schema_privilege(r.oid, n.oid, 'USAGE'), false)
			FROM (SELECT 1) one LEFT JOIN pg_roles r ON r.rolname = $1 LEFT JOIN pg_namespace n ON n.nspname = $1`, s.schema).
			Scan(&user, &database, &role, &member, &schema, &owned)
		if err != nil {
			return domain(err)
		}
		if schema && !owned {
			return ErrRole.WithMessage("the schema %s of database %s does not belong to the role %s, as after a restore without the roles", s.schema, database, s.schema).
				Fix("restore into an empty database, after `pg_dumpall --roles-only` of the old server; docs/reliability.md has the steps")
		}
		quote := func(name string) string { return pgx.Identifier{name}.Sanitize() }
		var missing []string
		if !role {
			missing = append(missing, "CREATE ROLE "+quote(s.schema)+" NOLOGIN")
		}
		if !member {
			missing = append(missing, "GRANT "+quote(s.schema)+" TO "+quote(user))
		}
		if !schema {
			missing = append(missing, "CREATE SCHEMA "+quote(s.schema)+" AUTHORIZATION "+quote(s.schema))
		}
		for i, statement := range missing {
			if _, err := conn.Exec(ctx, statement); err != nil {
				if state(err) == insufficientPrivilege {
					return ErrRole.WithMessage("%s is not allowed to prepare database %s; run as an administrator: %s;",
						user, database, strings.Join(missing[i:], "; "))
				}
				return domain(err)
			}
		}
		return prepareMarks(ctx, conn, quote(s.schema))
	})
}
