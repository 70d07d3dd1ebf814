// Package proto_test checks the contracts with vectors that Python reads, too.
package proto_test

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/plugin/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/session/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// TestGolden checks that the JSON and the wire form of each vector are the same message;
// python/tests/contract/test_golden.py checks the same.
func TestGolden(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../schemas/golden/contracts.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Name, Message, Wire string
		JSON                json.RawMessage
	}
	if err := json.Unmarshal(data, &vectors); err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		t.Run(v.Name, func(t *testing.T) {
			t.Parallel()
			kind, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(v.Message))
			if err != nil {
				t.Fatal(err)
			}
			read, parsed := kind.New().Interface(), kind.New().Interface()
			wire, err := hex.DecodeString(v.Wire)
			if err != nil {
				t.Fatal(err)
			}
			if err := proto.Unmarshal(wire, read); err != nil {
				t.Fatal(err)
			}
			if err := protojson.Unmarshal(v.JSON, parsed); err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(read, parsed) {
				t.Errorf("the wire form is %v, the JSON form is %v", read, parsed)
			}
			if got, err := (proto.MarshalOptions{Deterministic: true}).Marshal(parsed); err != nil || hex.EncodeToString(got) != v.Wire {
				t.Errorf("serialized: %x, %v, want %s", got, err, v.Wire)
			}
		})
	}
}
