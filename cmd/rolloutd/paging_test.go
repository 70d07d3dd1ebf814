package main

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/proto/gen/names"
)

// Every list refuses a page token that no response had: a list that took it for another row would
// skip or repeat rows without a word.
func TestEveryListRefusesAForeignPageToken(t *testing.T) {
	t.Parallel()
	s, ctx := allShape(t), deadline(t)
	tested := 0
	for _, name := range methods() {
		service, method, _ := strings.Cut(name, "/")
		found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service))
		if err != nil {
			t.Fatal(err)
		}
		m := found.(protoreflect.ServiceDescriptor).Methods().ByName(protoreflect.Name(method))
		token := m.Input().Fields().ByName("page_token")
		if token == nil {
			continue
		}
		if m.IsStreamingServer() {
			t.Errorf("%s is a stream with pages: call it here", name)
			continue
		}
		tested++
		request := dynamicpb.NewMessage(m.Input())
		request.Set(token, protoreflect.ValueOfString("no page has this"))
		for _, field := range []protoreflect.Name{"run_id", "session_id"} {
			if f := m.Input().Fields().ByName(field); f != nil && f.Kind() == protoreflect.StringKind {
				request.Set(f, protoreflect.ValueOfString(id.NewRun(testTime)))
			}
		}
		var reply proto.Message = dynamicpb.NewMessage(m.Output())
		if err := s.conn(t, names.SchedulerService).Invoke(ctx, "/"+name, request, reply); rpcerr.Reason(err) != paging.ReasonToken {
			t.Errorf("%s: %v, %v", name, err, reply)
		}
	}
	if tested < 8 {
		t.Errorf("%d lists", tested)
	}
}
