package bus

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// electionTimeout is longer than the election of a stream leader takes.
	electionTimeout = 10 * time.Second
	// outageGap is the time without a request after which the next failure starts a new outage. A
	// lookup takes 10 s to fail.
	outageGap = 3 * electionTimeout
)

// failover moves the connection to another server of the cluster when no stream leader has answered
// through the current one for longer than an election takes. A server whose routes were cut may not
// learn of the leader that its neighbors know.
type failover struct {
	nc  *nats.Conn
	log *slog.Logger

	mu      sync.Mutex
	outages map[string]outage // by consumer; kept here because a Consumer is looked up again after an error
	moved   time.Time         // when the connection was moved last
}

// outage is the time since when a consumer has had no answer, and of the last failed request.
type outage struct{ since, last time.Time }

func newFailover(nc *nats.Conn, log *slog.Logger) *failover {
	return &failover{nc: nc, log: log, outages: map[string]outage{}}
}

// check moves the connection if requests have been without a responder since the given time for
// longer than electionTimeout. It returns the start of the outage, or zero if there is a responder.
func (f *failover) check(noResponders bool, since time.Time) time.Time {
	switch {
	case !noResponders:
		return time.Time{}
	case since.IsZero():
		return time.Now()
	case time.Since(since) >= electionTimeout && len(f.nc.Servers()) > 1:
		f.move()
	}
	return since
}

// move reconnects to another server, at most once per electionTimeout. All users of the connection
// move with it.
func (f *failover) move() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.moved) < electionTimeout {
		return
	}
	f.log.Warn("a NATS server knows no leader of an existing stream; connecting to another server", "server", f.nc.ConnectedServerName())
	if err := f.nc.ForceReconnect(); err != nil {
		f.log.Warn("cannot connect to another NATS server", "error", err)
	}
	f.moved = time.Now()
}

// record takes the outcome of a request about a consumer and moves the connection if the consumer
// has been without a responder for too long. Outcomes that are neither an answer nor a missing
// responder, such as a timeout, are ignored.
func (f *failover) record(consumer string, answered bool, err error) {
	noResponders := errors.Is(err, nats.ErrNoResponders)
	if !answered && !noResponders {
		return
	}
	now := time.Now()
	f.mu.Lock()
	o := f.outages[consumer]
	if now.Sub(o.last) > outageGap {
		o.since = time.Time{}
	}
	f.mu.Unlock()
	o = outage{since: f.check(noResponders, o.since), last: now}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.outages[consumer] = o; !noResponders {
		delete(f.outages, consumer)
	}
}
