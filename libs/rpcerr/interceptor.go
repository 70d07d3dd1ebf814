package rpcerr

import (
	"context"
	"log/slog"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// Unary maps what a unary handler returns. It belongs outermost, so that the errors of the other
// interceptors pass it too.
func Unary(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		resp, err := next(ctx, req)
		return resp, Edge(ctx, log, info.FullMethod, err)
	}
}

// Stream maps what a streaming handler returns.
func Stream(log *slog.Logger) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		return Edge(ss.Context(), log, info.FullMethod, next(srv, ss))
	}
}

// Edge turns err into the status error that leaves the process and logs what the caller will not
// see. A context that was canceled with a domain error as its cause (a drain, a fence) answers with
// that cause.
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
