package gateway

import (
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// mostRefusals is the number of sessions whose last refused request is kept.
const mostRefusals = 4096

// refusal is why the last request of a session was refused.
type refusal struct {
	at   time.Time
	text string
}

// refusals are the sessions whose last request can't succeed if it is repeated. The zero value is
// ready for use.
type refusals struct {
	mu        sync.Mutex
	bySession map[string]refusal
}

// ended records how a request of a session has ended.
func (r *refusals) ended(session string, at time.Time, err error) {
	if session == "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch rpcerr.Code(err) {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.OutOfRange, codes.PermissionDenied, codes.NotFound:
	default: // also of a lost worker or an agent that has left: the next request may succeed
		delete(r.bySession, session)
		return
	}
	if r.bySession == nil {
		r.bySession = map[string]refusal{}
	}
	for other := range r.bySession { // any one
		if len(r.bySession) < mostRefusals {
			break
		}
		delete(r.bySession, other)
	}
	text := rpcerr.Text(err)
	if reason := rpcerr.Reason(err); reason != "" {
		text = reason + ": " + text
	}
	r.bySession[session] = refusal{at: at, text: text}
}

// of returns why the last request of a session was refused.
func (r *refusals) of(session string) (refusal, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	found, has := r.bySession[session]
	return found, has
}
