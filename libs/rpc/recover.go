package rpc

import (
	"context"
	"log/slog"
	"runtime/debug"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// errPanic is returned to the caller of a method that panicked.
var errPanic = rpcerr.New(codes.Internal, rpcerr.ReasonPanic, "internal error: the service's log has the detail")

// caught turns a panic of a handler into errPanic, and its stack into a line of the log. Deferred.
func caught(ctx context.Context, log *slog.Logger, method string, err *error) {
	if p := recover(); p != nil {
		log.ErrorContext(ctx, "panic in a handler", "method", method, "panic", p, "stack", string(debug.Stack()))
		*err = errPanic
	}
}

func recoverUnary(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (resp any, err error) {
		defer caught(ctx, log, info.FullMethod, &err)
		return next(ctx, req)
	}
}

func recoverStream(log *slog.Logger) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
		defer caught(ss.Context(), log, info.FullMethod, &err)
		return next(srv, ss)
	}
}
