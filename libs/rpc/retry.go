package rpc

import (
	"encoding/json"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

// A method is retried after UNAVAILABLE if its proto declares it idempotent (option
// idempotency_level) or its name says that it only reads. Other methods may have been executed, so
// gRPC retries them only if the request never left this process. Streams are not retried: their
// readers must handle a break after the first message, so they can handle one before it too.
var readVerbs = []string{"Get", "List", "Stat", "Query", "Verify", "Validate", "Tokenize"}

type methodConfig struct {
	Name         []methodName `json:"name"`
	WaitForReady bool         `json:"waitForReady"`
	RetryPolicy  *retryPolicy `json:"retryPolicy,omitempty"`
}

type methodName struct {
	Service string `json:"service,omitempty"`
	Method  string `json:"method,omitempty"`
}

type retryPolicy struct {
	MaxAttempts          int      `json:"maxAttempts"`
	InitialBackoff       string   `json:"initialBackoff"`
	MaxBackoff           string   `json:"maxBackoff"`
	BackoffMultiplier    float64  `json:"backoffMultiplier"`
	RetryableStatusCodes []string `json:"retryableStatusCodes"`
}

// serviceConfig is gRPC's service config of a client: round robin, and up to five attempts for
// idempotent methods. Calls to a service wait until an instance is ready. Calls to an address fail
// at once if no process listens there, because a restarted process gets another address.
func serviceConfig(waitForReady bool) string {
	config := struct {
		LoadBalancing []map[string]struct{} `json:"loadBalancingConfig"`
		Methods       []methodConfig        `json:"methodConfig"`
	}{
		LoadBalancing: []map[string]struct{}{{"round_robin": {}}},
		Methods:       []methodConfig{{Name: []methodName{{}}, WaitForReady: waitForReady}},
	}
	if names := idempotentMethods(); len(names) > 0 {
		config.Methods = append(config.Methods, methodConfig{Name: names, WaitForReady: waitForReady, RetryPolicy: &retryPolicy{
			MaxAttempts: 5, InitialBackoff: "0.1s", MaxBackoff: "2s", BackoffMultiplier: 2, RetryableStatusCodes: []string{"UNAVAILABLE"},
		}})
	}
	raw, err := json.Marshal(config)
	if err != nil {
		panic(err) // impossible for a struct of strings
	}
	return string(raw)
}

// idempotentMethods looks through the contracts that this binary links.
var idempotentMethods = sync.OnceValue(func() []methodName {
	var names []methodName
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		if !strings.HasPrefix(string(f.Package()), "rollout.") {
			return true
		}
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				if m := s.Methods().Get(j); idempotent(m) {
					names = append(names, methodName{string(s.FullName()), string(m.Name())})
				}
			}
		}
		return true
	})
	slices.SortFunc(names, func(a, b methodName) int { return strings.Compare(a.Service+a.Method, b.Service+b.Method) })
	return names
})

func idempotent(m protoreflect.MethodDescriptor) bool {
	if m.IsStreamingClient() || m.IsStreamingServer() {
		return false
	}
	if o, ok := m.Options().(*descriptorpb.MethodOptions); ok && proto.Size(o) > 0 &&
		o.GetIdempotencyLevel() != descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN {
		return true
	}
	return slices.ContainsFunc(readVerbs, func(v string) bool { return strings.HasPrefix(string(m.Name()), v) })
}
