// Package storetest is the suite that every gateway.Store passes.
package storetest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/services/gateway"
)

// Run runs the suite. open returns an empty store.
func Run(t *testing.T, open func(t *testing.T) gateway.Store) {
	t.Run("unknown session", func(t *testing.T) {
		if _, err := open(t).Turns(t.Context(), "sess-x"); !errors.Is(err, gateway.ErrSession) {
			t.Fatalf("got %v", err)
		}
	})
	t.Run("sessions expire after their newest turn", func(t *testing.T) {
		store, now := open(t), time.Now()
		turn := func(age time.Duration) []*gateway.Turn {
			return []*gateway.Turn{{RequestId: "a", Time: timestamppb.New(now.Add(-age))}}
		}
		add := func(session string, ages ...time.Duration) {
			for _, age := range ages {
				if err := store.Append(t.Context(), session, turn(age)); err != nil {
					t.Fatal(err)
				}
			}
		}
		add("sess-active", 3*time.Hour)
		for i := range 100 {
			add(fmt.Sprintf("sess-old-%d", i), 3*time.Hour, 2*time.Hour)
		}
		add("sess-active", 2*time.Hour, 0)
		add("sess-recent", time.Minute)
		for _, want := range []int{100, 0} {
			if got, err := store.Expire(t.Context(), now.Add(-time.Hour)); err != nil || got != want {
				t.Errorf("deleted %d sessions, %v; want %d", got, err, want)
			}
		}
		for session, want := range map[string]int{"sess-active": 3, "sess-recent": 1, "sess-old-0": 0, "sess-old-99": 0} {
			if got, err := store.Turns(t.Context(), session); len(got) != want || errors.Is(err, gateway.ErrSession) != (want == 0) {
				t.Errorf("%s has %d turns, %v", session, len(got), err)
			}
		}
	})
	t.Run("turns of a session are returned unchanged and in order", func(t *testing.T) {
		store := open(t)
		first := &gateway.Turn{RequestId: "a", PromptTokenIds: []uint32{1, 2}, TokenIds: []uint32{3}, Logprobs: []float32{-0.25}, FinishReason: "stop"}
		second := &gateway.Turn{RequestId: "b", Sample: 1, TokenIds: []uint32{4}}
		for _, call := range []struct {
			session string
			turns   []*gateway.Turn
		}{{"sess-1", []*gateway.Turn{first}}, {"sess-2", []*gateway.Turn{second}}, {"sess-1", []*gateway.Turn{second, first}}} {
			if err := store.Append(t.Context(), call.session, call.turns); err != nil {
				t.Fatal(err)
			}
		}
		got, err := store.Turns(t.Context(), "sess-1")
		if err != nil {
			t.Fatal(err)
		}
		want := []*gateway.Turn{first, second, first}
		if len(got) != len(want) {
			t.Fatalf("got %d turns", len(got))
		}
		for i := range want {
			if !proto.Equal(got[i], want[i]) {
				t.Errorf("turn %d: got %v, want %v", i, got[i], want[i])
			}
		}
	})
}
