package storetest

import (
	"errors"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/services/gateway"
)

func responses(t *testing.T, store gateway.Store) {
	t.Helper()
	now := time.Now()
	for session, age := range map[string]time.Duration{"sess-1": 0, "sess-old": 2 * time.Hour} {
		if _, err := store.Append(t.Context(), session, run, []*gateway.Segment{segment(session, "s0", "", "aaaa", now.Add(-age))}); err != nil {
			t.Fatal(err)
		}
	}
	for id, session := range map[string]string{"resp_a": "sess-1", "resp_b": "sess-1", "resp_c": "sess-old"} {
		r := &gateway.Response{ID: id, Session: session, Body: []byte(`{"id":"` + id + `"}`), Input: []byte(`["\u0000"]`)}
		if err := store.KeepResponse(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	check := func(id, session string) {
		t.Helper()
		got, err := store.Response(t.Context(), id)
		if session == "" {
			if !errors.Is(err, gateway.ErrResponse) {
				t.Errorf("%s: %v, %v", id, got, err)
			}
			return
		}
		if err != nil || got.ID != id || got.Session != session || string(got.Body) != `{"id":"`+id+`"}` || string(got.Input) != `["\u0000"]` {
			t.Errorf("%s: %v, %v", id, got, err)
		}
	}
	check("resp_a", "sess-1")
	check("resp_c", "sess-old")
	check("resp_x", "")
	if err := store.DeleteResponse(t.Context(), "resp_a"); err != nil {
		t.Fatal(err)
	}
	if err := store.DeleteResponse(t.Context(), "resp_a"); !errors.Is(err, gateway.ErrResponse) {
		t.Errorf("deleted again: %v", err)
	}
	if n, err := store.Expire(t.Context(), now.Add(-time.Hour)); n != 1 || err != nil {
		t.Errorf("expired %d, %v", n, err)
	}
	check("resp_a", "")
	check("resp_b", "sess-1")
	check("resp_c", "")
}
