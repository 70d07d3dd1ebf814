package apikey

import (
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// ErrRate means that a key is over one of its limits. It has the time to wait.
var ErrRate = rpcerr.New(codes.ResourceExhausted, "RATE_LIMITED", "the API key is over its limit")

// Limiter counts the requests and tokens of keys against their limits, in one process. Safe for
// concurrent use.
type Limiter struct {
	mu   sync.Mutex
	used map[string]*usage // by name of the key
}

// usage is the buckets of a key. A bucket has the limit per minute as its size, and fills in a
// minute.
type usage struct{ requests, tokens bucket }

type bucket struct {
	missing float64 // of the limit, at the time; more than the limit for a debt
	at      time.Time
}

// refill brings the bucket to now.
func (b *bucket) refill(limit int32, now time.Time) {
	b.missing = max(0, b.missing-float64(limit)*max(0, now.Sub(b.at).Minutes()))
	b.at = now
}

// wait is how long until the bucket has n. The caller has refilled it.
func (b *bucket) wait(limit int32, n float64) time.Duration {
	over := b.missing + n - float64(limit)
	if limit == 0 || over <= 0 {
		return 0
	}
	return time.Duration(over / float64(limit) * float64(time.Minute))
}

func (l *Limiter) of(r *Record, now time.Time) *usage {
	if l.used == nil {
		l.used = map[string]*usage{}
	}
	u := l.used[r.GetName()]
	if u == nil {
		u = &usage{}
		l.used[r.GetName()] = u
	}
	u.requests.refill(r.GetRequestsPerMinute(), now)
	u.tokens.refill(r.GetTokensPerMinute(), now)
	return u
}

// Begin counts a request. A request begins if the key has a request and any token left, because its
// tokens are known at its end. ErrRate.
func (l *Limiter) Begin(r *Record, now time.Time) error {
	if r.GetRequestsPerMinute() == 0 && r.GetTokensPerMinute() == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	u := l.of(r, now)
	if wait := u.requests.wait(r.GetRequestsPerMinute(), 1); wait > 0 {
		return ErrRate.WithMessage("the API key %s is over its limit of %d requests a minute", r.GetName(), r.GetRequestsPerMinute()).RetryAfter(wait)
	}
	if wait := u.tokens.wait(r.GetTokensPerMinute(), 1); wait > 0 {
		return ErrRate.WithMessage("the API key %s is over its limit of %d tokens a minute", r.GetName(), r.GetTokensPerMinute()).RetryAfter(wait)
	}
	u.requests.missing++
	return nil
}

// Add counts the tokens of a request.
func (l *Limiter) Add(r *Record, tokens int, now time.Time) {
	if r.GetTokensPerMinute() == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of(r, now).tokens.missing += float64(tokens)
}
