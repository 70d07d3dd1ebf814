package credential

import (
	"context"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

var (
	// ErrExpired refuses a credential that the scheduler has not renewed. It is Unavailable, because
	// the call of a worker whose clock was changed succeeds as soon as the renewal arrives.
	ErrExpired = rpcerr.New(codes.Unavailable, "CREDENTIAL_EXPIRED", "the credential of the worker has expired").RetryAfter(time.Second).
			Fix("compare the clocks of the hosts of the scheduler and of this service")
	// ErrRevoked refuses a credential of a run that has ended, or of an incarnation that was
	// replaced.
	ErrRevoked = rpcerr.New(codes.Unauthenticated, "CREDENTIAL_REVOKED", "the credential of the worker is not in force any more")
)

// Standing is what the scheduler knows of a run.
type Standing struct {
	Incarnation uint32 // the newest
	Ended       bool   // its workers have stopped
}

const (
	fresh   = time.Second            // for how long an answer of the scheduler is used
	patient = 250 * time.Millisecond // for how long checks wait for the next one, from the question
	asking  = 5 * time.Second        // for how long an answer is awaited in total
	maxRuns = 10_000                 // that are remembered
)

// Authority decides which credentials are in force. Its methods may be called from many goroutines.
type Authority struct {
	token string
	now   func() time.Time

	mu     sync.Mutex
	source func(ctx context.Context, run string) (Standing, error)
	runs   map[string]*standing
}

// standing is the last answer about a run.
type standing struct {
	last    Standing
	known   bool
	at      time.Time
	asked   time.Time     // the last question
	pending chan struct{} // closed when its answer has arrived; nil: it has
}

// NewAuthority makes an Authority that decides by the signature and the expiry. now may be nil.
func NewAuthority(meshToken string, now func() time.Time) *Authority {
	if now == nil {
		now = time.Now
	}
	return &Authority{token: meshToken, now: now, runs: map[string]*standing{}}
}

// Follow makes the Authority ask for the standing of a run, at most once a second for each run.
// source returns an error with the code NotFound for a run that does not exist. While it returns
// another error, the last answer and the expiry decide.
func (a *Authority) Follow(source func(ctx context.Context, run string) (Standing, error)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.source = source
}

// Check returns the claims of a credential; worker is false if the text is none. ErrExpired,
// ErrRevoked.
func (a *Authority) Check(ctx context.Context, text string) (c Claims, worker bool, err error) {
	c, worker = Verify(a.token, text)
	if !worker {
		return Claims{}, false, nil
	}
	return c, true, a.InForce(ctx, c)
}

// InForce is Check for claims whose signature was verified before.
func (a *Authority) InForce(ctx context.Context, c Claims) error {
	if c.Expires != 0 && a.now().After(time.Unix(c.Expires, 0).Add(Skew)) {
		return ErrExpired.With("run", c.Run).With("role", c.Role).
			WithMessage("the credential of a worker of %s with the role %s expired at %s", c.Run, c.Role, time.Unix(c.Expires, 0).UTC().Format(time.RFC3339))
	}
	now, known := a.standing(ctx, c)
	switch {
	case !known || c.Incarnation == now.Incarnation && !now.Ended:
		return nil
	case now.Ended:
		return ErrRevoked.With("run", c.Run).WithMessage("the credential of a worker of %s is not in force any more: the run has ended", c.Run)
	}
	return ErrRevoked.With("run", c.Run).With("incarnation", strconv.FormatUint(uint64(c.Incarnation), 10)).With("newest", strconv.FormatUint(uint64(now.Incarnation), 10)).
		WithMessage("the credential of a worker of %s is not in force any more: it is of incarnation %d, and incarnation %d has begun", c.Run, c.Incarnation, now.Incarnation)
}

// standing returns the newest answer about a run, which is at most fresh old unless the scheduler
// does not answer.
func (a *Authority) standing(ctx context.Context, c Claims) (Standing, bool) {
	a.mu.Lock()
	if a.source == nil {
		a.mu.Unlock()
		return Standing{}, false
	}
	s := a.runs[c.Run]
	if s == nil {
		if len(a.runs) >= maxRuns {
			clear(a.runs)
		}
		s = &standing{}
		a.runs[c.Run] = s
	}
	if s.known && c.Incarnation > s.last.Incarnation { // signed, so it has begun since
		s.at = time.Time{}
	}
	if s.pending == nil && (s.at.IsZero() || time.Since(s.at) >= fresh) {
		s.pending, s.asked = make(chan struct{}), time.Now()
		go a.ask(context.WithoutCancel(ctx), a.source, c.Run, s)
	}
	pending, left := s.pending, patient-time.Since(s.asked)
	a.mu.Unlock()
	if pending != nil && left > 0 {
		timer := time.NewTimer(left)
		defer timer.Stop()
		select {
		case <-pending:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return Standing{Incarnation: max(s.last.Incarnation, c.Incarnation), Ended: s.last.Ended && c.Incarnation <= s.last.Incarnation}, s.known
}

// ask stores the answer about a run.
func (a *Authority) ask(ctx context.Context, source func(context.Context, string) (Standing, error), run string, s *standing) {
	ctx, cancel := context.WithTimeout(ctx, asking)
	defer cancel()
	answer, err := source(ctx, run)
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case rpcerr.Code(err) == codes.NotFound:
		s.last, s.known = Standing{Incarnation: s.last.Incarnation, Ended: true}, true
	case err == nil:
		s.last, s.known = answer, true
	}
	s.at = time.Now()
	close(s.pending)
	s.pending = nil
}
