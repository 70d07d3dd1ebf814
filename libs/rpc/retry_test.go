package rpc

import (
	"encoding/json"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	_ "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1" // the test uses its contract
)

func TestOnlyIdempotentMethodsAreRetried(t *testing.T) {
	t.Parallel()
	names := idempotentMethods()
	has := func(method string) bool {
		return slices.Contains(names, methodName{"rollout.buffer.v1.BufferService", method})
	}
	for _, read := range []string{"GetMissing", "ListSteps", "GetBatch"} {
		if !has(read) {
			t.Errorf("%s is not retried", read)
		}
	}
	for _, write := range []string{"CommitStep", "LeaseBatch", "ReissueGroups", "WatchLedger", "ReadPayloads"} {
		if has(write) {
			t.Errorf("%s is retried", write)
		}
	}
}

func TestServiceConfigParses(t *testing.T) {
	t.Parallel()
	for _, wait := range []bool{false, true} {
		if !json.Valid([]byte(serviceConfig(wait))) {
			t.Fatal("no JSON")
		}
		// grpc refuses a default service config that it can't read.
		conn, err := grpc.NewClient("passthrough:///x", grpc.WithDefaultServiceConfig(serviceConfig(wait)), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	}
}
