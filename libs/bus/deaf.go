package bus

import (
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	election = 10 * time.Second // a stream's next leader is there long before
	lull     = 3 * election     // after such a time without a question a silence is another one; a look-up takes 10 s to fail
)

// silences keeps since when nobody has answered for a consumer, and when a server was left last. It outlives the Consumers, which are
// looked up anew after an error.
type silences struct {
	mu    sync.Mutex
	since map[string]silence
	moved time.Time
}

type silence struct{ since, last time.Time }

// elsewhere has the connection go to another server once nobody has answered through this one for as long as no election takes: a server
// of a cluster whose routes were cut can miss for ever that a stream has a leader, while its neighbours know. It returns since when
// nobody has.
func (b *Bus) elsewhere(nobody bool, since time.Time) time.Time {
	switch {
	case !nobody:
		return time.Time{}
	case since.IsZero():
		return time.Now()
	case time.Since(since) >= election && len(b.nc.Servers()) > 1:
		b.leave()
	}
	return since
}

// leave goes to another server, unless this one is too new to be judged: all who use the connection go with it.
func (b *Bus) leave() {
	b.silences.mu.Lock()
	defer b.silences.mu.Unlock()
	if time.Since(b.silences.moved) < election {
		return
	}
	b.log.Warn("a NATS server knows no leader of a stream that is there; going to another one", "server", b.nc.ConnectedServerName())
	if err := b.nc.ForceReconnect(); err != nil {
		b.log.Warn("no way to another NATS server", "error", err)
	}
	b.silences.moved = time.Now()
}

// heard takes what became of a question about a consumer, and leaves a server through which nobody answers it. What is neither an
// answer nor a refusal, as when its time was up, changes nothing.
func (b *Bus) heard(consumer string, answered bool, err error) {
	nobody := errors.Is(err, nats.ErrNoResponders)
	if !answered && !nobody {
		return
	}
	now := time.Now()
	b.silences.mu.Lock()
	was := b.silences.since[consumer]
	if now.Sub(was.last) > lull {
		was.since = time.Time{}
	}
	b.silences.mu.Unlock()
	is := silence{since: b.elsewhere(nobody, was.since), last: now}
	b.silences.mu.Lock()
	defer b.silences.mu.Unlock()
	if b.silences.since[consumer] = is; !nobody {
		delete(b.silences.since, consumer)
	}
}
