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

// database looks at PostgreSQL as the user of the URL.
func database(ctx context.Context, p Patient, r *report) {
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
		r.fail("reach", errors.New("the URL can't be read"), "write postgres://user@host:5432/name")
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
		r.fail("reach", err, "is the server up, the host right, and does pg_hba.conf let this user in?")
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
		r.ok("permissions", "may make schemas and roles")
	} else {
		r.warn("permissions", "the user may not make schemas and roles", "GRANT CREATE ON DATABASE and ALTER ROLE .. CREATEROLE, or make the schemas and roles before; rolloutd names the statements that are missing")
	}
	r.skew(theirs, began, between)
}
