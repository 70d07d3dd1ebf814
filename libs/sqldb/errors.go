package sqldb

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"google.golang.org/grpc/codes"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/rollout-rl/rollout/libs/process"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Errors of this package, compared with errors.Is.
var (
	ErrURL         = rpcerr.New(codes.InvalidArgument, "DATABASE_URL", "the database's URL can't be read; write postgres://user:password@host:5432/name")
	ErrUnavailable = rpcerr.New(codes.Unavailable, "DATABASE_UNAVAILABLE", "the database does not answer").RetryAfter(time.Second)
	ErrDenied      = rpcerr.New(codes.PermissionDenied, "DATABASE_DENIED", "the database refused the user; check the URL's user, password and database")
	ErrRole        = rpcerr.New(codes.PermissionDenied, "DATABASE_ROLE", "the database lacks a role or a schema")
	ErrVersion     = rpcerr.New(codes.FailedPrecondition, "DATABASE_VERSION", "PostgreSQL is older than version 14; upgrade the server")
	ErrNewer       = rpcerr.New(codes.FailedPrecondition, "DATABASE_NEWER", "the database was brought up to date by a newer rolloutd; start that version, or restore a backup from before")
	ErrDamaged     = rpcerr.New(codes.DataLoss, "DATABASE_DAMAGED", "the database file is damaged")
	ErrOlder       = rpcerr.New(codes.FailedPrecondition, "DATABASE_OLDER", "the database is of an older rolloutd").Fix(fixUnread)
	ErrUnread      = rpcerr.New(codes.FailedPrecondition, "DATABASE_UNREAD", "the database can't be read as it is").Fix(fixUnread)
	ErrConflict    = rpcerr.New(codes.Aborted, "DATABASE_CONFLICT", "other transactions were always first").RetryAfter(100 * time.Millisecond)
	ErrTimeout     = rpcerr.New(codes.DeadlineExceeded, "DATABASE_TIMEOUT", "the database gave up on a statement that took longer than database.statement_timeout_s")
	ErrFull        = rpcerr.New(codes.ResourceExhausted, "DATABASE_FULL", "the database has no space left").RetryAfter(time.Second)
	// ErrLocked: another process has a write transaction open in the file of a SQLite database.
	ErrLocked = rpcerr.New(codes.Unavailable, "DATABASE_LOCKED", "another process has locked the database for ten seconds").RetryAfter(time.Second).
			Fix("end the process that writes to the database: `fuser FOLDER/db/*.sqlite` lists those that have it open, such as a `sqlite3` shell; active runs continue by themselves")
	// ErrUnknown: the answer to a commit was lost, and the database does not answer any more. The
	// transaction may have been committed. An idempotent call is repeated, as after ErrUnavailable.
	ErrUnknown = rpcerr.New(codes.Unavailable, "DATABASE_COMMIT_UNKNOWN", "the answer to a commit was lost and the database does not answer any more").RetryAfter(time.Second)
)

const fixUnread = "copy the state folder, each file of it, to where you may write (`cp -r`), and name the copy with --state-dir"

// SQLSTATEs that are branched on.
const (
	serializationFailure  = "40001"
	deadlockDetected      = "40P01"
	idleTimeout           = "25P03"
	readOnly              = "25006" // the server is a standby
	queryCanceled         = "57014"
	diskFull              = "53100"
	tooManyConnections    = "53300"
	insufficientPrivilege = "42501"
)

// serverMessage is the sentence of a PostgreSQL error, "" of another.
func serverMessage(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Message
	}
	return ""
}

// state is the SQLSTATE of a PostgreSQL error, "" of another.
func state(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// whole returns err, or ErrDamaged if SQLite reports that the file is damaged or not a database.
func whole(err error, path string) error {
	var found *sqlite.Error
	if errors.As(err, &found) && (found.Code()&0xff == sqlite3.SQLITE_CORRUPT || found.Code()&0xff == sqlite3.SQLITE_NOTADB) {
		return damaged(path, err)
	}
	return sqliteError(err, path)
}

func damaged(path string, err error) error {
	return ErrDamaged.WithMessage("the database %s is damaged", path).Wrap(err).
		Fix("restore the state folder from a backup; `sqlite3 " + path + " .recover` saves what can be read")
}

// sqliteError is err, or ErrDiskFull where a file of the database could not grow, or ErrLocked with
// the process that has locked the file at path, if that can be found.
func sqliteError(err error, path string) error {
	var found *sqlite.Error
	switch {
	case !errors.As(err, &found):
		return err
	case found.Code()&0xff == sqlite3.SQLITE_FULL, found.Code() == sqlite3.SQLITE_IOERR_SHMSIZE:
		return rpcerr.ErrDiskFull.Wrap(err)
	case found.Code()&0xff == sqlite3.SQLITE_BUSY:
		locked := ErrLocked
		for _, file := range []string{path + "-shm", path} {
			if by, found := process.Locking(file); found {
				locked = locked.WithMessage("the process %d (`%s`) has locked the database %s for ten seconds", by.PID, by.Command, path).
					Fix(fmt.Sprintf("end its transaction, or the process: `kill %d`; active runs continue by themselves", by.PID))
				break
			}
		}
		return locked.Wrap(err)
	}
	return err
}

// transient reports whether the connection failed, and not the statement.
func transient(err error) bool {
	var network net.Error
	var connect *pgconn.ConnectError
	switch code := state(err); {
	case strings.HasPrefix(code, "08"), code == "57P01", code == "57P02", code == "57P03", code == tooManyConnections, code == idleTimeout, code == readOnly:
		return true
	case code != "":
		return false
	}
	// The error of a system call has the methods of a network error, even for operations on files,
	// which say nothing about the server.
	var operation *net.OpError
	var call syscall.Errno
	broken := errors.As(err, &operation) || errors.As(err, &network) && !errors.As(err, &call)
	return errors.As(err, &connect) || broken || errors.Is(err, driver.ErrBadConn) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed)
}

// domain converts a driver's error to one of this package, if there is a suitable one. Context
// errors stay.
func domain(err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) && state(err) == "" && !transient(err) {
		return err
	}
	switch code := state(err); {
	case errors.Is(err, ErrTimeout): // it names a lock
		return err
	case strings.HasPrefix(code, "28"), code == "3D000":
		return ErrDenied.Wrap(err)
	case code == queryCanceled:
		return ErrTimeout.Wrap(err)
	case code == diskFull:
		return ErrFull.Wrap(err)
	case code == serializationFailure, code == deadlockDetected:
		return ErrConflict.Wrap(err)
	case code == readOnly:
		return ErrUnavailable.WithMessage("the database refuses to write: it is a standby, or default_transaction_read_only is on").
			Fix("let the URL name the primary, promote the standby, or set default_transaction_read_only off for the database and the user; runs continue by themselves").Wrap(err)
	case code == tooManyConnections:
		return ErrUnavailable.WithMessage("the database has no connection left: %s", serverMessage(err)).
			Fix("list who holds them with `SELECT usename, application_name, count(*) FROM pg_stat_activity GROUP BY 1, 2`; end what is not needed, or raise max_connections or the CONNECTION LIMIT of the user; runs continue by themselves").Wrap(err)
	case transient(err):
		return ErrUnavailable.Wrap(err)
	}
	return err
}

const (
	firstPause    = 10 * time.Millisecond
	longestPause  = 500 * time.Millisecond
	reconnect     = 5 * time.Second  // how long to retry a transaction while the server is unreachable
	resolveWithin = 10 * time.Second // how long to query the result of a lost commit
)

// backoff doubles its pauses, with jitter, until limit is used up.
type backoff struct {
	limit time.Duration
	pause time.Duration
	since time.Time
}

// next waits. It returns false if the time is up or ctx has ended.
func (b *backoff) next(ctx context.Context) bool {
	if b.since.IsZero() {
		b.since = time.Now()
	}
	b.pause = min(max(2*b.pause, firstPause), longestPause)
	if time.Since(b.since) >= b.limit {
		return false
	}
	timer := time.NewTimer(b.pause/2 + rand.N(b.pause))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
