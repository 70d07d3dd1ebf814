package rpcerr

import (
	"context"
	"errors"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

// internalMessage is the message that a caller gets for an error that is not a domain error.
const internalMessage = "internal error: the service's log has the detail"

// GRPCStatus returns the error with its details as a status. gRPC calls it too, so a domain error
// keeps its code without an interceptor.
func (e *Error) GRPCStatus() *status.Status { return e.statusWith(e.message) }

func (e *Error) statusWith(message string) *status.Status {
	st := status.New(e.code, message)
	var details []protoadapt.MessageV1
	if e.reason != "" {
		details = append(details, &errdetails.ErrorInfo{Reason: e.reason, Domain: Domain, Metadata: e.metadata})
	}
	if e.retryAfter > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(e.retryAfter)})
	}
	if len(e.violations) > 0 {
		bad := &errdetails.BadRequest{}
		for _, v := range e.violations {
			bad.FieldViolations = append(bad.FieldViolations,
				&errdetails.BadRequest_FieldViolation{Field: v.Path, Description: v.Description})
		}
		details = append(details, bad)
	}
	if len(details) == 0 {
		return st
	}
	full, err := st.WithDetails(details...)
	if err != nil { // only for code OK, which New's callers never use
		return st
	}
	return full
}

// fromStatus reads a domain error back from a received status, at any depth of wrapping.
func fromStatus(err error) (*Error, bool) {
	var carrier interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &carrier) {
		return nil, false
	}
	st := carrier.GRPCStatus()
	if st == nil || st.Code() == codes.OK {
		return nil, false
	}
	e := &Error{code: st.Code(), message: st.Message(), cause: err}
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() == Domain {
				e.reason, e.metadata = d.GetReason(), d.GetMetadata()
			}
		case *errdetails.RetryInfo:
			e.retryAfter = d.GetRetryDelay().AsDuration()
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				e.violations = append(e.violations, Violation{Path: v.GetField(), Description: v.GetDescription()})
			}
		}
	}
	return e, true
}

// classify returns the error for the caller. It hides the details of an error that is not a domain
// error.
func classify(err error) *Error {
	if e, ok := From(err); ok && e.code != codes.Unknown {
		return e
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return New(codes.DeadlineExceeded, ReasonDeadlineExceeded, "the deadline passed")
	case errors.Is(err, context.Canceled):
		return New(codes.Canceled, ReasonCanceled, "the call was canceled")
	}
	return New(codes.Internal, ReasonInternal, internalMessage)
}
