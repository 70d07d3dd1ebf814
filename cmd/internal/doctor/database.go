package doctor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"time"

	_ "github.com/rollout-rl/rollout/libs/sqldb" // the driver "pgx"
)

// database checks PostgreSQL as the user of the URL.
func database(ctx context.Context, p Input, r *report) {
	url, err := p.Config.Database.Postgres(p.Environ)
	if err != nil {
		r.fail("configuration", err, "")
		return
	}
	if url == "" {
		r.skip("reach", "SQLite files in the state folder")
		return
	}
	db, err := sql.Open("pgx", url)
	if err != nil {
		r.fail("reach", errors.New("the URL is invalid"), "write postgres://user@host:5432/name")
		return
	}
	defer db.Close()
	began := p.Now()
	var version int
	var theirs time.Time
	var create, roles bool
	err = db.QueryRowContext(ctx, `SELECT current_setting('server_version_num')::int, clock_timestamp(),
		has_database_privilege(current_database(), 'CREATE'), (SELECT rolcreaterole OR rolsuper FROM pg_roles WHERE rolname = current_user)`).
		Scan(&version, &theirs, &create, &roles)
	if err != nil {
		r.fail("reach", err, "check that the server is running, the host, and that pg_hba.conf allows this user")
		return
	}
	between := p.Now().Sub(began)
	r.ok("reach", "")
	if version < 140000 {
		r.fail("version", fmt.Errorf("PostgreSQL %d", version/10000), "use PostgreSQL 14 or newer")
	} else {
		r.ok("version", "PostgreSQL "+strconv.Itoa(version/10000))
	}
	if create && roles {
		r.ok("permissions", "can create schemas and roles")
	} else {
		r.warn("permissions", "the user cannot create schemas and roles", "GRANT CREATE ON DATABASE and ALTER ROLE .. CREATEROLE, or create them in advance; rolloutd prints the missing statements")
	}
	r.skew(theirs, began, between)
}
