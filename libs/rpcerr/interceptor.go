package rpcerr

import (
	"context"
	"log/slog"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// Unary maps the errors of unary handlers. It must be the outermost interceptor, so that it also
// maps the errors of the others.
func Unary(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		resp, err := next(ctx, req)
		return resp, Edge(ctx, log, info.FullMethod, err)
	}
}

// Stream maps the errors of streaming handlers.
func Stream(log *slog.Logger) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		return Edge(ss.Context(), log, info.FullMethod, next(srv, ss))
	}
}

// Edge converts err to the status error for the caller, and logs the details that the caller does
// not get. A context that was canceled with a domain error as its cause (a drain, a fence) becomes
// that error.
func Edge(ctx context.Context, log *slog.Logger, method string, err error) error {
	if err == nil {
		return nil
	}
	e := classify(err)
	if e.code == codes.Canceled || e.code == codes.DeadlineExceeded {
		if cause, ok := From(context.Cause(ctx)); ok {
			return cause.GRPCStatus().Err()
		}
	}
	message := Text(err) // with the operations that were wrapped around the domain error
	if e.reason == ReasonInternal && e.message == internalMessage {
		log.ErrorContext(ctx, "internal error", "method", method, "error", err)
		message = internalMessage
	}
	if _, made := err.(interface{ Unwrap() error }); !made || e.reason == ReasonCanceled || e.reason == ReasonDeadlineExceeded {
		message = e.message
	}
	return e.statusWith(message).Err()
}
