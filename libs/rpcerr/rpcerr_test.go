package rpcerr_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

var errStale = rpcerr.New(codes.FailedPrecondition, "WEIGHTS_STALE", "weights are stale")

// edge passes err through the interceptor, and returns the logged text and the error of the client.
func edge(t *testing.T, err error) (logged string, got error) {
	t.Helper()
	var buf bytes.Buffer
	log := slog.New(slog.NewTextHandler(&buf, nil))
	out := rpcerr.Edge(t.Context(), log, "/rollout.buffer.v1.Buffer/Commit", err)
	// A round trip through the wire form, as grpc does it.
	return buf.String(), status.FromProto(status.Convert(out).Proto()).Err()
}

func TestDomainErrorSurvivesTheHop(t *testing.T) {
	t.Parallel()
	sent := fmt.Errorf("commit step 3: %w", errStale.With("run", "run-1").RetryAfter(2*time.Second).Field("step", "is 3, want 4"))
	_, got := edge(t, sent)

	if rpcerr.Reason(got) != "WEIGHTS_STALE" || rpcerr.Code(got) != codes.FailedPrecondition {
		t.Fatalf("reason %q code %v", rpcerr.Reason(got), rpcerr.Code(got))
	}
	e, ok := rpcerr.From(fmt.Errorf("outer: %w", got))
	if !ok {
		t.Fatal("a wrapped status is not a domain error")
	}
	if e.Metadata()["run"] != "run-1" || e.RetryDelay() != 2*time.Second {
		t.Errorf("metadata %v delay %v", e.Metadata(), e.RetryDelay())
	}
	if v := e.Violations(); len(v) != 1 || v[0].Path != "step" {
		t.Errorf("violations %v", v)
	}
	if !strings.Contains(e.Error(), "commit step 3") {
		t.Errorf("the operation is lost: %q", e.Error())
	}
	if !errors.Is(e, errStale) {
		t.Error("a received error does not equal its sentinel")
	}
}

// Errors for people contain no gRPC code, regardless of the number of hops.
func TestTextIsForPeople(t *testing.T) {
	t.Parallel()
	_, hop := edge(t, fmt.Errorf("commit step 3: %w", errStale))
	_, second := edge(t, fmt.Errorf("make step 3: %w", hop))
	if got := status.Convert(second).Message(); got != "make step 3: commit step 3: weights are stale" {
		t.Errorf("after two hops: %q", got)
	}
	fixed := errStale.Fix("deliver them again")
	_, hop = edge(t, fmt.Errorf("commit step 3: %w", fixed))
	_, second = edge(t, fmt.Errorf("make step 3: %w", hop))
	if got := status.Convert(second).Message(); got != "weights are stale" {
		t.Errorf("an error with a fix after two hops: %q", got)
	}
	if rpcerr.Fix(second) != "deliver them again" || rpcerr.Fix(hop) != "deliver them again" || rpcerr.Fix(errStale) != "" || rpcerr.Fix(nil) != "" {
		t.Errorf("fix %q", rpcerr.Fix(second))
	}
	if got := rpcerr.Text(fmt.Errorf("wait: %w", status.Error(codes.Unavailable, "connection refused"))); got != "wait: connection refused" {
		t.Errorf("text %q", got)
	}
	refused := status.Error(codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:1: connect: connection refused"`)
	if got := rpcerr.Text(refused); got != "dial tcp 127.0.0.1:1: connect: connection refused" {
		t.Errorf("text %q", got)
	}
}

func TestSentinelIsNotChanged(t *testing.T) {
	t.Parallel()
	a := errStale.With("k", "a")
	_ = a.With("k", "b")
	if a.Metadata()["k"] != "a" || errStale.Metadata() != nil {
		t.Fatalf("a %v sentinel %v", a.Metadata(), errStale.Metadata())
	}
	base := errStale.Field("x", "1")
	l, r := base.Field("y", "2"), base.Field("z", "3")
	if l.Violations()[1].Path != "y" || r.Violations()[1].Path != "z" {
		t.Fatal("copies share their violations")
	}
}

func TestUnknownErrorHidesItsDetail(t *testing.T) {
	t.Parallel()
	logged, got := edge(t, errors.New("dial postgres://user:hunter2@db"))
	if rpcerr.Code(got) != codes.Internal || rpcerr.Reason(got) != rpcerr.ReasonInternal {
		t.Fatalf("code %v reason %q", rpcerr.Code(got), rpcerr.Reason(got))
	}
	if strings.Contains(got.Error(), "hunter2") {
		t.Error("the detail reached the caller")
	}
	if !strings.Contains(logged, "hunter2") || !strings.Contains(logged, "Buffer/Commit") {
		t.Errorf("the detail is not in the log: %q", logged)
	}
}

// Any write may fail for lack of space, wherever it is: no service has to convert that error.
func TestWriteThatFailsForLackOfSpace(t *testing.T) {
	t.Parallel()
	for _, cause := range []error{syscall.ENOSPC, syscall.EDQUOT} {
		err := fmt.Errorf("save the spec: %w", &fs.PathError{Op: "write", Path: "/runs/1/spec.json", Err: cause})
		_, got := edge(t, err)
		for name, e := range map[string]error{"here": err, "received": got} {
			if !rpcerr.DiskFull(e) || rpcerr.Code(e) != codes.ResourceExhausted || rpcerr.Fix(e) == "" {
				t.Errorf("%s: reason %q code %v fix %q", name, rpcerr.Reason(e), rpcerr.Code(e), rpcerr.Fix(e))
			}
			if text := rpcerr.Text(e); !strings.Contains(text, "/runs/1/spec.json") || strings.Count(text, "disk is full") != 1 {
				t.Errorf("%s: %q", name, text)
			}
		}
		if wrapped, ok := rpcerr.From(err); !ok || !errors.Is(wrapped, cause) {
			t.Errorf("%v lost its cause", wrapped)
		}
	}
	if rpcerr.DiskFull(nil) || rpcerr.DiskFull(errStale) {
		t.Error("another error is a full disk")
	}
}

func TestContextErrors(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		code codes.Code
	}{
		{fmt.Errorf("read: %w", context.Canceled), codes.Canceled},
		{fmt.Errorf("read: %w", context.DeadlineExceeded), codes.DeadlineExceeded},
		{nil, codes.OK},
		{status.Error(codes.NotFound, "gone"), codes.NotFound},
	} {
		_, got := edge(t, c.err)
		if rpcerr.Code(got) != c.code {
			t.Errorf("%v became %v, want %v", c.err, rpcerr.Code(got), c.code)
		}
	}
}

func TestCauseOfACanceledContextWins(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(rpcerr.New(codes.Unavailable, rpcerr.ReasonDraining, "going away").RetryAfter(time.Second))
	err := rpcerr.Edge(ctx, slog.New(slog.DiscardHandler), "/m", ctx.Err())
	if rpcerr.Reason(err) != rpcerr.ReasonDraining || rpcerr.Code(err) != codes.Unavailable {
		t.Fatalf("got %v", err)
	}
}

func TestNewKeepsItsCause(t *testing.T) {
	t.Parallel()
	cause := errors.New("disk full")
	err := rpcerr.New(codes.ResourceExhausted, "DISK_FULL", "seal segment: %w", cause)
	if !errors.Is(err, cause) || err.Error() != "seal segment: disk full" {
		t.Fatalf("got %v", err)
	}
	if !errors.Is(errStale.Wrap(cause), cause) || !errors.Is(errStale.Wrap(cause), errStale) {
		t.Error("Wrap lost one of the two")
	}
}
