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
	replication(ctx, db, r)
}

// replication checks that a standby has what was committed. Without the role pg_monitor the server
// shows how many standbys there are, not how each of them replicates.
func replication(ctx context.Context, db *sql.DB, r *report) {
	var standbys, visible, synchronous int
	var required, commit string
	err := db.QueryRowContext(ctx, `SELECT count(*), count(sync_state), count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')),
		current_setting('synchronous_standby_names'), current_setting('synchronous_commit') FROM pg_stat_replication`).
		Scan(&standbys, &visible, &synchronous, &required, &commit)
	fix := "set synchronous_standby_names to the standby's application_name (ALTER SYSTEM, then SELECT pg_reload_conf()), and synchronous_commit = on"
	switch {
	case err != nil:
		r.warn("replication", "its state can't be read: "+err.Error(), "GRANT pg_monitor to the user")
	case required != "" && standbys == 0:
		r.warn("replication", "synchronous_standby_names is set and no standby is connected: commits wait", "start the standby, or set synchronous_standby_names = ''")
	case standbys == 0:
		r.skip("replication", "no standby")
	case required == "", visible > 0 && synchronous == 0, commit == "off", commit == "local":
		r.warn("replication", "the standby is asynchronous: a failover loses the last commits, and runs whose steps were in them fail", fix)
	default:
		r.ok("replication", "synchronous")
	}
}
