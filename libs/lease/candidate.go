package lease

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

// Candidate is a process that can become the leader.
type Candidate struct {
	Table   *Table
	Holder  string // unique, new for each start of a process
	Address string // host:port of its gRPC
	TTL     time.Duration
	Log     *slog.Logger

	mu   sync.Mutex
	seen Lease // last read
	fail error // why the lease can't be read or held now; nil if it can
}

// Term is one time of leading.
type Term struct {
	Epoch uint64

	mu    sync.Mutex
	until time.Time // by this process's own clock
}

// Valid reports whether no other process can have taken the lease yet. A process that was suspended
// finds out here, before it looks at anything else.
func (t *Term) Valid() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return time.Now().Before(t.until)
}

func (t *Term) extend(until time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.until = until
}

func (t *Term) left() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return time.Until(t.until)
}

// Leader is the lease as this process saw it last.
func (c *Candidate) Leader() Lease {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen
}

func (c *Candidate) see(l Lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen = l
}

// Failure is why the lease can't be read, taken, or renewed; nil if it can.
func (c *Candidate) Failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.fail
}

// failed remembers why the lease can't be read, taken, or renewed; nil: it can.
func (c *Candidate) failed(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail = err
}

// Run waits for the lease and calls lead with each term, until ctx ends or lead fails. The context
// of lead ends with the term, with the cause ErrNotLeader where another one took the lease; then
// lead must return. When ctx ends the lease is set free after lead has returned.
func (c *Candidate) Run(ctx context.Context, lead func(ctx context.Context, term *Term) error) error {
	if c.TTL == 0 {
		c.TTL = TTL
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	for {
		mine, began, err := c.wait(ctx)
		if err != nil {
			return nil // ctx has ended
		}
		if err := c.hold(ctx, mine, began, lead); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
	}
}

// wait returns when this process has the lease. began is the time of the successful request.
func (c *Candidate) wait(ctx context.Context) (mine Lease, began time.Time, err error) {
	tick := time.NewTicker(c.TTL / 10)
	defer tick.Stop()
	var last Lease
	var since time.Time // last is known since then
	var failing bool
	for ctx.Err() == nil {
		row, err := c.read(ctx)
		if err == nil {
			if failing {
				c.Log.InfoContext(ctx, "the lease can be read again")
				failing = false
			}
			c.see(row)
			if row.Epoch != last.Epoch || row.Beat != last.Beat || since.IsZero() {
				last, since = row, time.Now() // started after the read, so it ends later than the holder's own TTL
			}
			if row.Holder == "" || time.Since(since) >= c.TTL {
				began = time.Now()
				if mine, err = c.Table.Take(ctx, row, c.Holder, c.Address); err == nil {
					c.see(mine)
					c.failed(nil)
					return mine, began, nil
				}
				if !errors.Is(err, errTaken) {
					c.see(Lease{Epoch: row.Epoch}) // no process holds it
				}
			}
		}
		if errors.Is(err, errTaken) {
			err = nil
		}
		if ctx.Err() == nil {
			c.failed(err)
		}
		if err != nil && ctx.Err() == nil && !failing {
			failing = true
			c.Log.WarnContext(ctx, "the lease can't be read or taken; trying on", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	return Lease{}, time.Time{}, ctx.Err()
}

func (c *Candidate) read(ctx context.Context) (Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, c.TTL)
	defer cancel()
	return c.Table.Read(ctx)
}

// hold leads for one term.
func (c *Candidate) hold(ctx context.Context, mine Lease, began time.Time, lead func(ctx context.Context, term *Term) error) error {
	term := &Term{Epoch: mine.Epoch}
	term.extend(began.Add(c.TTL))
	c.Log.InfoContext(ctx, "leading", "epoch", mine.Epoch)
	leading, end := context.WithCancelCause(ctx)
	renewing, stop := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { // runs until the work has ended, so that the last writes pass the fence
		if err := c.renew(renewing, mine, term); err != nil {
			c.Log.WarnContext(ctx, "stepping down", "epoch", mine.Epoch, "error", err)
			end(ErrNotLeader)
		}
	})
	err := lead(leading, term)
	lost := leading.Err() != nil && ctx.Err() == nil
	stop()
	wg.Wait()
	end(nil)
	term.extend(time.Time{})
	if lost {
		return nil // whether or not lead returned an error
	}
	release, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.TTL)
	defer cancel()
	if e := c.Table.Release(release, mine); e != nil {
		c.Log.InfoContext(ctx, "the lease was not set free; it ends by itself", "error", e)
	}
	return err
}

// renew returns nil when ctx ends, else why the term is over.
func (c *Candidate) renew(ctx context.Context, mine Lease, term *Term) error {
	tick := time.NewTicker(c.TTL / 5)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		began := time.Now()
		attempt, cancel := context.WithTimeout(ctx, max(term.left(), time.Millisecond))
		next, err := c.Table.Renew(attempt, mine)
		cancel()
		switch {
		case err == nil && term.Valid():
			mine = next
			term.extend(began.Add(c.TTL))
			c.see(mine)
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, errTaken):
			return ErrNotLeader.Wrap(err)
		case !term.Valid():
			c.failed(err)
			return errors.Join(ErrNotLeader.WithMessage("the lease was not renewed in time"), err)
		}
	}
}
