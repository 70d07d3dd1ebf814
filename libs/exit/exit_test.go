package exit

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

func TestCodes(t *testing.T) {
	t.Parallel()
	for want, errs := range map[int][]error{
		Usage:       {New(Usage, "", "x"), fmt.Errorf("wrapped: %w", New(Usage, "", "x"))},
		Data:        {status.Error(codes.InvalidArgument, "x"), status.Error(codes.FailedPrecondition, "x"), errors.Join(nil, Silent(Data))},
		NoInput:     {status.Error(codes.NotFound, "x")},
		Unavailable: {status.Error(codes.Unavailable, "x"), status.Error(codes.DeadlineExceeded, "x"), status.Error(codes.Unauthenticated, "x")},
		Software:    {errors.New("x"), status.Error(codes.Internal, "x"), status.Error(codes.Unknown, "x"), status.Error(codes.Unimplemented, "x")},
		CannotMake:  {status.Error(codes.AlreadyExists, "x")},
		Interrupted: {context.Canceled, status.Error(codes.Canceled, "x"), fmt.Errorf("dial: %w", context.Canceled)},
	} {
		for _, err := range errs {
			if got := From(err).Code; got != want {
				t.Errorf("%v: %d, want %d", err, got, want)
			}
		}
	}
}

func TestReasonAndMessageOfAServer(t *testing.T) {
	t.Parallel()
	err := rpcerr.New(codes.NotFound, "RUN_NOT_FOUND", "run x does not exist")
	got := From(err.GRPCStatus().Err())
	if got.Reason != "RUN_NOT_FOUND" || got.Error() != "run x does not exist" {
		t.Errorf("%q %q", got.Reason, got.Error())
	}
}
