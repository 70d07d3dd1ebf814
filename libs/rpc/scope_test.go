package rpc

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/serving/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Every method of the seven services has a scope, and the table names no other.
func TestEveryMethodHasAScope(t *testing.T) {
	t.Parallel()
	seen, packages := map[string]bool{}, map[string]bool{}
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			name := string(s.FullName())
			if !strings.HasPrefix(name, "rollout.") || strings.HasSuffix(name, "WorkerService") || name == "rollout.weights.v1.WeightsService" {
				continue // workers check the mesh token themselves
			}
			packages[string(f.Package())] = true
			for j := range s.Methods().Len() {
				method := "/" + name + "/" + string(s.Methods().Get(j).Name())
				seen[method] = true
				if _, ok := scopes[method]; !ok {
					t.Errorf("%s has no scope: put it into the table of scope.go", method)
				}
			}
		}
		return true
	})
	if len(packages) != 9 { // the scheduler has two
		t.Errorf("packages %v", packages)
	}
	for method := range scopes {
		if !seen[method] && !strings.HasPrefix(method, "/grpc.reflection.") {
			t.Errorf("the table names %s, which no service has", method)
		}
	}
}
