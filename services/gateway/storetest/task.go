package storetest

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// group is the tasks of a prompt group, whose sessions have names with a prefix.
func group(prefix string, index uint64, samples int, deadline time.Time) []*gateway.Task {
	out := make([]*gateway.Task, samples)
	for i := range out {
		out[i] = &gateway.Task{
			SessionId: fmt.Sprintf("%s-%d", prefix, i), Deadline: timestamppb.New(deadline),
			Key: &trajectoryv1.TrajectoryKey{RunId: run, Index: index, Sample: uint32(i)},
		}
	}
	return out
}

func issued(t *testing.T, store gateway.Store) {
	t.Helper()
	tasks, again := group("one", 3, 2, time.Now()), group("two", 3, 2, time.Now())
	got, err := store.Issue(t.Context(), run, tasks)
	if err != nil || len(got) != 2 || !proto.Equal(got[1], tasks[1]) {
		t.Fatalf("got %v, %v", got, err)
	}
	if got, err = store.Issue(t.Context(), run, again); err != nil || len(got) != 2 || !proto.Equal(got[0], tasks[0]) {
		t.Fatalf("issued again: %v, %v", got, err)
	}
	if session, err := store.Session(t.Context(), "one-1", 0); err != nil || !proto.Equal(session.GetTask(), tasks[1]) || session.GetRunId() != run || session.GetEnd() != nil {
		t.Errorf("got %v, %v", session, err)
	}
	if _, err := store.Session(t.Context(), "two-1", 0); !errors.Is(err, gateway.ErrSession) {
		t.Errorf("got %v", err)
	}
	var wg sync.WaitGroup
	won := make(chan string, 4)
	for gateways := range 4 {
		wg.Go(func() {
			got, err := store.Issue(t.Context(), run, group(fmt.Sprintf("racing%d", gateways), 4, 2, time.Now()))
			if err != nil || len(got) != 2 {
				t.Errorf("got %v, %v", got, err)
				return
			}
			won <- got[0].GetSessionId() + got[1].GetSessionId()
		})
	}
	wg.Wait()
	close(won)
	first := <-won
	for other := range won {
		if other != first {
			t.Errorf("two gateways issued %s and %s", first, other)
		}
	}
}

func bound(t *testing.T, store gateway.Store) {
	t.Helper()
	task := group("sess", 5, 1, time.Now())[0]
	if _, err := store.Bind(t.Context(), task); !errors.Is(err, gateway.ErrSession) {
		t.Fatalf("got %v", err)
	}
	if _, err := store.Append(t.Context(), "sess-0", run, []*gateway.Segment{segment("sess-0", "s0", "", "aaaa", time.Now())}); err != nil {
		t.Fatal(err)
	}
	if got, err := store.Bind(t.Context(), task); err != nil || !proto.Equal(got, task) {
		t.Fatalf("got %v, %v", got, err)
	}
	other := group("sess", 6, 1, time.Now())[0]
	if got, err := store.Bind(t.Context(), other); err != nil || !proto.Equal(got, task) {
		t.Fatalf("bound again: %v, %v", got, err)
	}
}

func finished(t *testing.T, store gateway.Store) {
	t.Helper()
	now := time.Now()
	tasks := group("sess", 7, 2, now.Add(time.Hour))
	if _, err := store.Issue(t.Context(), run, tasks); err != nil {
		t.Fatal(err)
	}
	id := gateway.GroupID(tasks[0].GetKey())
	unsettled := func(want int) {
		t.Helper()
		if n, err := store.Unsettled(t.Context(), id); err != nil || n != want {
			t.Errorf("%d sessions are not settled, %v; want %d", n, err, want)
		}
	}
	unsettled(2)
	if _, err := store.Finish(t.Context(), "sess-x", &gateway.End{}, now); !errors.Is(err, gateway.ErrSession) {
		t.Errorf("got %v", err)
	}
	if _, err := store.Append(t.Context(), "sess-0", run, []*gateway.Segment{segment("sess-0", "s0", "", "aaaa", now)}); err != nil {
		t.Fatal(err)
	}
	end := &gateway.End{Outcome: trajectoryv1.Outcome_OUTCOME_COMPLETED, Reward: 0.5}
	got, err := store.Finish(t.Context(), "sess-0", end, now.Add(time.Minute))
	if err != nil || !proto.Equal(got.GetEnd(), end) || len(got.GetSegments()) != 1 || got.GetTask() == nil {
		t.Fatalf("got %v, %v", got, err)
	}
	if got, err = store.Finish(t.Context(), "sess-0", &gateway.End{Reward: 2}, now); err != nil || !proto.Equal(got.GetEnd(), end) {
		t.Errorf("finished again: %v, %v", got, err)
	}
	if _, err := store.Append(t.Context(), "sess-0", run, []*gateway.Segment{segment("sess-0", "s1", "s0", "bbbb", now)}); !errors.Is(err, gateway.ErrSessionClosed) {
		t.Errorf("got %v", err)
	}
	unsettled(2)
	final := &gateway.End{Outcome: trajectoryv1.Outcome_OUTCOME_COMPLETED, Reward: 0.5, Accepted: true}
	for _, session := range []string{"sess-0", "sess-1"} { // the second is open: nothing to settle
		if err := store.Settle(t.Context(), session, final); err != nil {
			t.Fatal(err)
		}
	}
	unsettled(1)
	if got, err := store.Session(t.Context(), "sess-0", 0); err != nil || !proto.Equal(got.GetEnd(), final) {
		t.Errorf("got %v, %v", got, err)
	}
}

func due(t *testing.T, store gateway.Store) {
	t.Helper()
	now := time.Now().Truncate(time.Millisecond)
	if _, err := store.Issue(t.Context(), run, group("late", 1, 2, now.Add(-time.Minute))); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Issue(t.Context(), run, group("later", 2, 1, now.Add(time.Minute))); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Append(t.Context(), "free", run, []*gateway.Segment{segment("free", "s0", "", "aaaa", now)}); err != nil {
		t.Fatal(err)
	}
	want := func(at time.Time, limit, n int) {
		t.Helper()
		if got, err := store.Due(t.Context(), at, now.Add(10*time.Second), limit); err != nil || len(got) != n {
			t.Errorf("at %s: due are %v, %v; want %d", at.Sub(now), got, err, n)
		}
	}
	want(now, 1, 1)
	want(now, 9, 1)
	want(now, 9, 0)
	want(now.Add(11*time.Second), 9, 2)
	if _, err := store.Finish(t.Context(), "late-0", &gateway.End{}, now.Add(20*time.Second)); err != nil {
		t.Fatal(err)
	}
	if err := store.Settle(t.Context(), "late-0", &gateway.End{}); err != nil {
		t.Fatal(err)
	}
	want(now.Add(time.Hour), 9, 2) // late-1 and later-0
}
