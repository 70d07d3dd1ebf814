// Package exit gives errors the exit code that scripts branch on, by sysexits(3).
package exit

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// The codes. 0 is success.
const (
	Usage       = 64  // the command line is wrong
	Data        = 65  // a configuration, dataset, reward, model or plan is wrong
	NoInput     = 66  // a file, run, or snapshot does not exist
	Unavailable = 69  // the server can't be reached
	Software    = 70  // the run failed, or rollout itself did
	CannotMake  = 73  // a file can't be written
	NoPerm      = 77  // a file belongs to another user
	Interrupted = 130 // the user stopped it
)

// Error is an error with its code.
type Error struct {
	Code   int
	Reason string // machine-readable, "" if unknown
	Fix    string // the fix; "" if it is not known
	Err    error  // nil: the error was already reported
}

func (e *Error) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// New creates an error for people: the problem and its fix.
func New(code int, fix, format string, args ...any) *Error {
	return &Error{Code: code, Fix: fix, Err: fmt.Errorf(format, args...)}
}

// Silent ends with a code after everything was printed.
func Silent(code int) *Error { return &Error{Code: code} }

// From gives any error its code: one of this package keeps it, one from a server is mapped, the
// rest is Software.
func From(err error) *Error {
	var own *Error
	if errors.As(err, &own) {
		return own
	}
	if errors.Is(err, context.Canceled) {
		return &Error{Code: Interrupted, Reason: rpcerr.ReasonCanceled, Err: errors.New("interrupted")}
	}
	out := &Error{Code: Software, Reason: rpcerr.Reason(err), Err: errors.New(rpcerr.Text(err))}
	s, ok := status.FromError(err)
	if !ok {
		out.Err = err
		return out
	}
	switch s.Code() {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.OutOfRange, codes.DataLoss:
		out.Code = Data
	case codes.NotFound:
		out.Code = NoInput
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted:
		out.Code, out.Fix = Unavailable, "see `rollout status` and the daemon's log"
	case codes.Unauthenticated, codes.PermissionDenied:
		out.Code, out.Fix = Unavailable, "put an API key into ROLLOUT_API_KEY, or name the server's token with --token-file"
	case codes.AlreadyExists:
		out.Code = CannotMake
	case codes.Canceled:
		out.Code = Interrupted
	}
	if fix := rpcerr.Fix(err); fix != "" {
		out.Fix = fix
	}
	return out
}
