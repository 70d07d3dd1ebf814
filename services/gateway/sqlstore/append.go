package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/services/gateway"
)

// Append implements gateway.Store. It shares its transaction with the other calls that wait for the
// ledger. It returns when the segments are stored, even if ctx has ended.
func (s *Store) Append(ctx context.Context, session, run string, segments []*gateway.Segment) (first int, err error) {
	a := &addition{session: session, run: run, segments: segments, raw: make([][]byte, len(segments)), turn: make(chan bool, 1)}
	for i, segment := range segments {
		if a.raw[i], err = proto.Marshal(segment); err != nil {
			return 0, fmt.Errorf("append to session %s: %w", session, err)
		}
		a.newest = max(a.newest, segment.GetTime().AsTime().UnixMilli())
	}
	if batch := s.queue.join(a); batch != nil {
		s.write(context.WithoutCancel(ctx), batch)
		s.queue.leave(a, batch)
	}
	if a.err != nil {
		return 0, fmt.Errorf("append to session %s: %w", session, a.err)
	}
	return a.first, nil
}

// addition is a call of Append and its result.
type addition struct {
	session, run string
	segments     []*gateway.Segment
	raw          [][]byte  // of each segment
	newest       int64     // time of the newest one
	turn         chan bool // receives whether the caller writes the next batch; otherwise there is a result
	first        int
	err          error
}

// maxBatch is the number of additions in one transaction.
const maxBatch = 128

// queue is the additions that wait for the transaction that is running. One of its callers at a
// time writes for all others: when it has finished, the first that waits is next.
type queue struct {
	mu      sync.Mutex
	waiting []*addition
	busy    bool
}

// join waits until the addition has its result, or is the first of the batch that it returns.
func (q *queue) join(a *addition) (batch []*addition) {
	q.mu.Lock()
	q.waiting = append(q.waiting, a)
	first := !q.busy
	q.busy = true
	q.mu.Unlock()
	if !first && !<-a.turn {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(maxBatch, len(q.waiting))
	batch = slices.Clone(q.waiting[:n])
	q.waiting = slices.Delete(q.waiting, 0, n)
	return batch
}

// leave ends the turn of the caller that has written a batch.
func (q *queue) leave(writer *addition, batch []*addition) {
	for _, a := range batch {
		if a != writer {
			a.turn <- false
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.busy = len(q.waiting) > 0; q.busy {
		q.waiting[0].turn <- true
	}
}

// errIrregular rolls back a batch with an addition that is refused, or that the session has
// already.
var errIrregular = errors.New("an addition is irregular")

// write sets the results of a batch. The additions of a refused one get a transaction each, so that
// one of them does not refuse the others.
func (s *Store) write(ctx context.Context, batch []*addition) {
	slices.SortFunc(batch, func(a, b *addition) int { return cmp.Compare(a.session, b.session) }) // other gateways lock the rows in the same order
	err := s.db.Tx(ctx, func(tx *sql.Tx) error {
		for _, a := range batch {
			if err := s.insert(ctx, tx, a); err != nil {
				return err
			}
		}
		return nil
	})
	alone := errors.Is(err, errIrregular) || len(batch) > 1 && err != nil && !affectsAll(err)
	for _, a := range batch {
		a.err = err
		if alone {
			a.err = s.db.Tx(ctx, func(tx *sql.Tx) error { return s.merge(ctx, tx, a) })
		}
	}
}

// affectsAll reports whether the database fails every transaction with err, or may have committed
// this one.
func affectsAll(err error) bool {
	return errors.Is(err, sqldb.ErrUnavailable) || errors.Is(err, sqldb.ErrFull) || errors.Is(err, sqldb.ErrUnknown)
}

const (
	// The row of the session is locked first, so that the numbers of a session become visible in
	// order.
	reserve = `INSERT INTO session (session_id, run_id, segments, updated_ms) VALUES ($1, $2, $3, $4)
		ON CONFLICT (session_id) DO UPDATE SET segments = session.segments + excluded.segments,
			updated_ms = CASE WHEN session.updated_ms < excluded.updated_ms THEN excluded.updated_ms ELSE session.updated_ms END
		RETURNING run_id, segments, state`
	insertSegment = insertInto + `($1, $2, $3, $4)` + unlessThere
	insertTwo     = insertInto + `($1, $2, $3, $4), ($5, $6, $7, $8)` + unlessThere // a prompt and its completion
	insertInto    = `INSERT INTO segment (session_id, number, segment_id, segment) VALUES `
	unlessThere   = ` ON CONFLICT (session_id, segment_id) DO NOTHING`
)

// insert adds segments that the session does not have. It returns errIrregular if it must not.
func (s *Store) insert(ctx context.Context, tx *sql.Tx, a *addition) error {
	var owner string
	var count, state int
	if err := s.reserve.row(ctx, tx, a.session, a.run, len(a.raw), a.newest).Scan(&owner, &count, &state); err != nil {
		return err
	}
	if state != open || owner != a.run {
		return errIrregular
	}
	if a.first = count - len(a.raw); a.first == 0 {
		if err := fence.Live(ctx, tx, s.db.Dialect, a.run); err != nil {
			return err
		}
	}
	for at := 0; at < len(a.raw); {
		statement, rows := s.insertSegment, 1
		if len(a.raw)-at > 1 {
			statement, rows = s.insertTwo, 2
		}
		var args []any
		for i := at; i < at+rows; i++ {
			args = append(args, a.session, a.first+i, a.segments[i].GetSegment().GetSegmentId(), a.raw[i])
		}
		result, err := statement.exec(ctx, tx, args...)
		if err != nil {
			return err
		}
		if n, err := result.RowsAffected(); int(n) != rows || err != nil {
			return cmp.Or(err, errIrregular)
		}
		at += rows
	}
	return nil
}

// merge is insert that refuses with the reason, and skips segments that the session has.
func (s *Store) merge(ctx context.Context, tx *sql.Tx, a *addition) error {
	var owner string
	var state int
	if err := s.reserve.row(ctx, tx, a.session, a.run, 0, a.newest).Scan(&owner, &a.first, &state); err != nil {
		return err
	}
	if state != open {
		return gateway.ErrSessionClosed.With("session", a.session)
	}
	if owner != a.run {
		return gateway.ErrSessionRun.WithMessage("session %s belongs to %s, not %s", a.session, owner, a.run)
	}
	if a.first == 0 {
		if err := fence.Live(ctx, tx, s.db.Dialect, a.run); err != nil {
			return err
		}
	}
	next := a.first
	for i, segment := range a.segments {
		added, err := s.add(ctx, tx, a.session, next, segment, a.raw[i])
		if err != nil {
			return err
		}
		if added {
			next++
		}
	}
	_, err := tx.ExecContext(ctx, `UPDATE session SET segments = $2 WHERE session_id = $1`, a.session, next)
	return err
}

// add inserts a segment, unless the session has it.
func (s *Store) add(ctx context.Context, tx *sql.Tx, session string, number int, segment *gateway.Segment, raw []byte) (added bool, err error) {
	name := segment.GetSegment().GetSegmentId()
	result, err := s.insertSegment.exec(ctx, tx, session, number, name, raw)
	if err != nil {
		return false, err
	}
	if n, err := result.RowsAffected(); n > 0 || err != nil {
		return n > 0, err
	}
	if err := tx.QueryRowContext(ctx, `SELECT segment FROM segment WHERE session_id = $1 AND segment_id = $2`, session, name).Scan(&raw); err != nil {
		return false, err
	}
	var stored gateway.Segment
	if err := proto.Unmarshal(raw, &stored); err != nil {
		return false, err
	}
	if !proto.Equal(stored.GetSegment(), segment.GetSegment()) {
		return false, gateway.ErrSegmentConflict.With("segment", name)
	}
	return false, nil
}
