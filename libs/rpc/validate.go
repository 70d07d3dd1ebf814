package rpc

import (
	"context"
	"errors"
	"fmt"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// ErrInvalidRequest carries one violation for each broken rule of the request's proto.
var ErrInvalidRequest = rpcerr.New(codes.InvalidArgument, rpcerr.ReasonInvalidRequest, "the request breaks the rules of its contract")

// validator checks every incoming message against the rules in its proto.
type validator struct{ v protovalidate.Validator }

func newValidator() (validator, error) {
	v, err := protovalidate.New()
	if err != nil {
		return validator{}, fmt.Errorf("compile validation rules: %w", err)
	}
	return validator{v}, nil
}

// check returns ErrInvalidRequest with all violations.
func (v validator) check(req any) error {
	m, ok := req.(proto.Message)
	if !ok {
		return nil
	}
	err := v.v.Validate(m)
	if err == nil {
		return nil
	}
	var broken *protovalidate.ValidationError
	if !errors.As(err, &broken) {
		return fmt.Errorf("validate %s: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	out := ErrInvalidRequest
	for i, violation := range broken.Violations {
		path := protovalidate.FieldPathString(violation.Proto.GetField())
		description := violation.Proto.GetMessage()
		if description == "" {
			description = "breaks rule " + violation.Proto.GetRuleId()
		}
		out = out.Field(path, description)
		if i == 0 { // so that clients that only show the message show the violation
			out = out.WithMessage("%s: %s: %s", ErrInvalidRequest.Error(), path, description)
		}
	}
	return out
}

func (v validator) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := v.check(req); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

func (v validator) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	return next(srv, &validatedStream{ss, v})
}

type validatedStream struct {
	grpc.ServerStream
	validator validator
}

func (s *validatedStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return s.validator.check(m)
}
