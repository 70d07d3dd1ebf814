package lease

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// pass forwards a call to the leader. It returns refused if no leader can be called.
func (g *router) pass(ctx context.Context, service, method string, req any, refused error) (any, error) {
	conn, out, err := g.toLeader(ctx, service, method, refused)
	if err != nil {
		return nil, err
	}
	resp := out.New().Interface()
	if err := conn.Invoke(mark(ctx), "/"+service+"/"+method, req, resp); err != nil {
		return nil, err
	}
	return resp, nil
}

// passStream is pass for calls whose answer is a stream, whatever they send.
func (g *router) passStream(ss grpc.ServerStream, service string, s grpc.StreamDesc, refused error) error {
	ctx, cancel := context.WithCancel(ss.Context())
	defer cancel()
	conn, out, err := g.toLeader(ctx, service, s.StreamName, refused)
	if err != nil {
		return err
	}
	in, err := messageOf(service, s.StreamName, false)
	if err != nil {
		return err
	}
	req := in.New().Interface()
	if err := ss.RecvMsg(req); err != nil {
		return err
	}
	up, err := conn.NewStream(mark(ctx), &grpc.StreamDesc{StreamName: s.StreamName, ServerStreams: true, ClientStreams: s.ClientStreams}, "/"+service+"/"+s.StreamName)
	if err == nil {
		err = up.SendMsg(req)
	}
	switch {
	case err != nil:
	case s.ClientStreams:
		go follow(ss, up, in) // ends with the call
	default:
		err = up.CloseSend()
	}
	for err == nil {
		resp := out.New().Interface()
		if err = up.RecvMsg(resp); err == nil {
			err = ss.SendMsg(resp)
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// follow passes on what else a caller sends.
func follow(ss grpc.ServerStream, up grpc.ClientStream, in protoreflect.MessageType) {
	for {
		req := in.New().Interface()
		if err := ss.RecvMsg(req); err != nil {
			_ = up.CloseSend() // answer the call here
			return
		}
		if up.SendMsg(req) != nil {
			return // the answers end too, and say why
		}
	}
}

// toLeader is a connection to the leader and the type of a method's answer.
func (g *router) toLeader(ctx context.Context, service, method string, refused error) (grpc.ClientConnInterface, protoreflect.MessageType, error) {
	if e, _ := rpcerr.From(refused); g.forward == nil || forwarded(ctx) || e != nil && e.Metadata()[Cause] != "" {
		return nil, nil, refused
	}
	out, err := messageOf(service, method, true)
	if err != nil {
		return nil, nil, err
	}
	conn, err := g.forward()
	return conn, out, err
}

func mark(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, forwardedKey, "1")
}

// messageOf is the type of a method's request or answer.
func messageOf(service, method string, answer bool) (protoreflect.MessageType, error) {
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service + "." + method))
	if err != nil {
		return nil, err
	}
	m, ok := d.(protoreflect.MethodDescriptor)
	if !ok {
		return nil, errors.New(service + "." + method + " is not a method")
	}
	if answer {
		return protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
	}
	return protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
}
