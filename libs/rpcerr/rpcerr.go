// Package rpcerr gives errors a code and a machine-readable reason that survive a gRPC hop.
//
// A service returns a domain error; the interceptors of this package turn it at the edge into a
// google.rpc.Status with an ErrorInfo{reason, domain "rollout", metadata}, a RetryInfo when a retry
// can help and a BadRequest with every violation. The caller reads the same reason back with
// Reason, whether the error crossed a process or not:
//
//	var ErrStale = rpcerr.New(codes.FailedPrecondition, "WEIGHTS_STALE", "weights are stale")
//	return fmt.Errorf("commit step %d: %w", n, ErrStale.With("run", run))
//	...
//	if rpcerr.Reason(err) == "WEIGHTS_STALE" { ... }
//
// What is lost at the boundary: the chain of wrapped errors (its text stays, in the message) and
// the detail of errors that are not domain errors, which reaches the log alone. An error that says
// how to fix it is a sentence for people and travels as it stands, without the operations that were
// wrapped around it.
package rpcerr

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
)

// Domain is the ErrorInfo domain of every reason in this project.
const Domain = "rollout"

// fixKey is the metadata entry of a fix.
const fixKey = "fix"

// Reasons of errors that this package creates; services declare reasons with their errors.
const (
	ReasonInternal         = "INTERNAL"
	ReasonPanic            = "PANIC"
	ReasonCanceled         = "CANCELED"
	ReasonDeadlineExceeded = "DEADLINE_EXCEEDED"
	ReasonInvalidRequest   = "INVALID_REQUEST"
	ReasonUnauthenticated  = "UNAUTHENTICATED"
	ReasonDraining         = "DRAINING"
	ReasonDiskFull         = "DISK_FULL"
)

// ErrDiskFull reports that a write failed, or was not begun, for lack of space on a disk.
var ErrDiskFull = New(codes.ResourceExhausted, ReasonDiskFull, "the disk is full").RetryAfter(time.Second).
	Fix("free some space on that disk; active runs continue by themselves")

// Violation is one thing wrong with one field of a request.
type Violation struct {
	Path        string // as in the proto, "config.algorithm.group_size"
	Description string // the problem and its fix
}

// Error is a domain error. It is immutable: With, RetryAfter and Field return a changed copy, so a
// package-level Error may serve as a sentinel. Errors of the same code and reason are equal under
// errors.Is.
type Error struct {
	code       codes.Code
	reason     string
	message    string
	cause      error
	metadata   map[string]string
	retryAfter time.Duration
	violations []Violation
}

// New creates a domain error. reason is UPPER_SNAKE_CASE and stable, because callers branch on it.
// format may contain one %w.
func New(code codes.Code, reason, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{code: code, reason: reason, message: err.Error(), cause: errors.Unwrap(err)}
}

// With adds a metadata entry for the ErrorInfo. No secrets: it reaches the caller.
func (e *Error) With(key, value string) *Error {
	c := e.clone()
	if c.metadata == nil {
		c.metadata = map[string]string{}
	}
	c.metadata[key] = value
	return c
}

// Fix adds what the caller can do, as one sentence for people.
func (e *Error) Fix(sentence string) *Error { return e.With(fixKey, sentence) }

// RetryAfter adds that the same call may succeed after d.
func (e *Error) RetryAfter(d time.Duration) *Error {
	c := e.clone()
	c.retryAfter = d
	return c
}

// Field adds a BadRequest violation; call it once for each thing that is wrong, not only for the
// first.
func (e *Error) Field(path, description string) *Error {
	c := e.clone()
	c.violations = append(c.violations, Violation{Path: path, Description: description})
	return c
}

// Wrap returns a copy that has err as its cause and err's text after its own.
func (e *Error) Wrap(err error) *Error {
	c := e.clone()
	c.message = e.message + ": " + Text(err)
	c.cause = err
	return c
}

// WithMessage returns a copy with another text, for an error whose text is made late.
func (e *Error) WithMessage(format string, args ...any) *Error {
	c := e.clone()
	c.message = fmt.Sprintf(format, args...)
	return c
}

func (e *Error) Error() string               { return e.message }
func (e *Error) Unwrap() error               { return e.cause }
func (e *Error) Code() codes.Code            { return e.code }
func (e *Error) Reason() string              { return e.reason }
func (e *Error) Metadata() map[string]string { return maps.Clone(e.metadata) }
func (e *Error) Violations() []Violation     { return append([]Violation(nil), e.violations...) }
func (e *Error) RetryDelay() time.Duration   { return e.retryAfter }

// Is reports whether target is a domain error of the same code and reason.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.reason == e.reason && t.code == e.code
}

func (e *Error) clone() *Error {
	c := *e
	c.metadata = maps.Clone(e.metadata)
	c.violations = e.violations[:len(e.violations):len(e.violations)]
	return &c
}

// From finds the domain error in err: one that was made here, at any depth of wrapping, or one that
// arrived as a gRPC status. A status without this project's ErrorInfo gives an Error with an empty
// reason. A system call that failed for lack of space gives ErrDiskFull, because any write may.
// Other plain errors give ok = false.
func From(err error) (e *Error, ok bool) {
	if err == nil {
		return nil, false
	}
	if errors.As(err, &e) {
		return e, true
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		e := ErrDiskFull.WithMessage("%s: %s", ErrDiskFull.message, plain(err.Error()))
		e.cause = err
		return e, true
	}
	return fromStatus(err)
}

// DiskFull reports whether err is ErrDiskFull, made here, received, or of a system call.
func DiskFull(err error) bool { return Reason(err) == ReasonDiskFull }

// Reason is the reason of the domain error in err, or "".
func Reason(err error) string {
	if e, ok := From(err); ok {
		return e.reason
	}
	return ""
}

// Code is the gRPC code that err has or will have at the edge: OK for nil, Internal for an error
// that is not a domain error.
func Code(err error) codes.Code {
	if err == nil {
		return codes.OK
	}
	return classify(err).code
}

// Fix returns the fix of the domain error in err, or "".
func Fix(err error) string {
	if e, ok := From(err); ok {
		return e.metadata[fixKey]
	}
	return ""
}

// statusHead is how grpc begins the text of a status: codes are for programs.
var statusHead = regexp.MustCompile(`rpc error: code = \w+ desc = `)

// dialing matches gRPC's prefix of network errors.
var dialing = regexp.MustCompile(`connection error: desc = "transport: (?:E|e)rror while dialing: ([^"]*)"`)

func plain(text string) string {
	return dialing.ReplaceAllString(statusHead.ReplaceAllString(text, ""), "$1")
}

// Text returns err as text for people: without the words of gRPC, and only the sentence of an error
// that has a fix.
func Text(err error) string {
	if e, ok := From(err); ok && e.metadata[fixKey] != "" {
		return plain(e.message)
	}
	return plain(err.Error())
}
