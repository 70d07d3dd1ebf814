package rpc_test

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/apikey/apikeytest"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// garbage is a codec that sends bytes as they are.
type garbage struct{}

func (garbage) Marshal(v any) ([]byte, error) { return v.([]byte), nil }
func (garbage) Unmarshal(data []byte, v any) error {
	return fmt.Errorf("a response: %d bytes", len(data))
}
func (garbage) Name() string { return "proto" }

// A request without a valid credential is refused before it is read: neither its size nor its bytes
// decide the answer.
func TestRequestsAreAuthorizedBeforeTheyAreDecoded(t *testing.T) {
	t.Parallel()
	called := func(context.Context) error { t.Error("the method was called"); return nil }
	b := setup(t, &events{list: called, tail: called}, rpc.ServerOptions{Keys: apikeytest.New(t).Ring})
	body := make([]byte, 100<<20) // more than rpc.MaxMessage
	for i := range body {
		body[i] = 0xff
	}
	for name, key := range map[string]string{"none": "", "not a key": "wrong", "unknown key": "rk-unknown"} {
		conn, err := rpc.NewDialer(rpc.DialerOptions{Token: key}).Dial(b.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for _, size := range []int{1 << 20, len(body)} {
			err = conn.Invoke(t.Context(), "/rollout.storage.v1.EventService/ListEvents", body[:size], nil,
				grpc.ForceCodec(garbage{}), grpc.MaxCallSendMsgSize(len(body)+1))
			if rpcerr.Code(err) != codes.Unauthenticated || rpcerr.Reason(err) != rpcerr.ReasonUnauthenticated {
				t.Errorf("%s, %d bytes: %v", name, size, err)
			}
		}
	}
}
