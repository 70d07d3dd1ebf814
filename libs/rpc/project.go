package rpc

import (
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/rollout-rl/rollout/libs/apikey"
)

// guard answers the calls of a key about runs of other projects with NOT_FOUND. It looks at the
// field run_id of requests, and of the messages in them. Services check what they find by other
// ids.
type guard struct{ projects *apikey.Projects }

const (
	// byName is the service that finds runs by names and prefixes of ids too. It knows the projects
	// itself.
	byName = "/rollout.run.v1.SchedulerService/"
	// imports takes snapshots of runs of other control planes.
	imports = "/rollout.snapshot.v1.SnapshotService/CreateSnapshot"
)

func (g guard) check(ctx context.Context, method string, req any) error {
	m, ok := req.(proto.Message)
	if ok {
		if err := checkRun(ctx, method, m); err != nil {
			return err
		}
	}
	if _, limited := apikey.ProjectOf(ctx); !ok || !limited || g.projects == nil || method == imports || strings.HasPrefix(method, byName) {
		return nil
	}
	for _, run := range runsIn(m.ProtoReflect()) {
		if err := g.projects.Check(ctx, run); err != nil {
			return err
		}
	}
	return nil
}

// runsIn returns the runs that a message names: its run_id, and those of the messages in it.
func runsIn(m protoreflect.Message) (runs []string) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Name() == "run_id" && f.Kind() == protoreflect.StringKind && f.Cardinality() != protoreflect.Repeated:
			runs = append(runs, v.String())
		case f.Message() != nil && f.IsList():
			for i := range v.List().Len() {
				runs = append(runs, runsIn(v.List().Get(i).Message())...)
			}
		case f.Message() != nil && !f.IsMap():
			runs = append(runs, runsIn(v.Message())...)
		}
		return true
	})
	return runs
}

func (g guard) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := g.check(ctx, info.FullMethod, req); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

func (g guard) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	return next(srv, &guardedStream{ss, g, info.FullMethod})
}

type guardedStream struct {
	grpc.ServerStream
	guard  guard
	method string
}

func (s *guardedStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return s.guard.check(s.Context(), s.method, m)
}
