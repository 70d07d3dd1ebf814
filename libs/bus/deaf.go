package bus

import (
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

const election = 10 * time.Second // a stream's next leader is there long before

// elsewhere has the connection go to another server once nobody has answered through this one for as long as no election takes: a server
// of a cluster whose routes were cut can miss for ever that a stream has a leader, while its neighbours know. It returns since when
// nobody has.
func (b *Bus) elsewhere(nobody bool, since time.Time) time.Time {
	switch {
	case !nobody:
		return time.Time{}
	case since.IsZero():
		return time.Now()
	case time.Since(since) < election || len(b.nc.Servers()) < 2:
		return since
	}
	b.log.Warn("a NATS server knows no leader of a stream that is there; going to another one", "server", b.nc.ConnectedServerName())
	if err := b.nc.ForceReconnect(); err != nil {
		b.log.Warn("no way to another NATS server", "error", err)
	}
	return time.Now()
}

// silences keeps since when nobody has answered for a consumer. It outlives the Consumer, which is looked up anew after an error.
type silences struct {
	mu    sync.Mutex
	since map[string]time.Time
}

// heard takes what became of a question about a consumer, and leaves a server through which nobody answers it.
func (b *Bus) heard(consumer string, err error) {
	b.silences.mu.Lock()
	defer b.silences.mu.Unlock()
	since := b.elsewhere(errors.Is(err, nats.ErrNoResponders), b.silences.since[consumer])
	if since.IsZero() {
		delete(b.silences.since, consumer)
		return
	}
	b.silences.since[consumer] = since
}
