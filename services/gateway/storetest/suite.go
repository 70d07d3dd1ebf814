// Package storetest is the suite that every gateway.Store passes.
package storetest

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	sessionv1 "github.com/rollout-rl/rollout/proto/gen/rollout/session/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

const run = "run-1"

// segment is a segment that continues parent.
func segment(session, name, parent string, ids string, at time.Time) *gateway.Segment {
	return &gateway.Segment{
		Segment: &sessionv1.Segment{SegmentId: name, SessionId: session, ParentSegmentId: parent, Role: sessionv1.Role_ROLE_USER,
			Tokens: uint32(len(ids) / 4), Inline: &sessionv1.SegmentTokens{TokenIds: []byte(ids)}},
		RequestId: "req-" + name, Time: timestamppb.New(at),
	}
}

// Run runs the suite. open returns an empty store.
func Run(t *testing.T, open func(t *testing.T) gateway.Store) {
	t.Run("unknown session", func(t *testing.T) {
		if _, err := open(t).Session(t.Context(), "sess-x", 0); !errors.Is(err, gateway.ErrSession) {
			t.Fatalf("got %v", err)
		}
	})
	t.Run("segments are returned unchanged and in order", func(t *testing.T) { returned(t, open(t)) })
	t.Run("a segment is appended once", func(t *testing.T) { once(t, open(t)) })
	t.Run("a session belongs to one run", func(t *testing.T) {
		store, now := open(t), time.Now()
		if _, err := store.Append(t.Context(), "sess-1", run, []*gateway.Segment{segment("sess-1", "s0", "", "aaaa", now)}); err != nil {
			t.Fatal(err)
		}
		_, err := store.Append(t.Context(), "sess-1", "run-2", []*gateway.Segment{segment("sess-1", "s1", "s0", "bbbb", now)})
		if !errors.Is(err, gateway.ErrSessionRun) {
			t.Fatalf("got %v", err)
		}
		if got, err := store.Session(t.Context(), "sess-1", 0); err != nil || len(got.GetSegments()) != 1 || got.GetRunId() != run {
			t.Fatalf("got %v, %v", got, err)
		}
	})
	t.Run("concurrent appends get numbers without gaps", func(t *testing.T) { concurrent(t, open(t)) })
	t.Run("a refused append does not refuse concurrent ones", func(t *testing.T) { mixed(t, open(t)) })
	t.Run("an append that the database refuses does not refuse concurrent ones", func(t *testing.T) { invalid(t, open(t)) })
	t.Run("a prompt group is issued once", func(t *testing.T) { issued(t, open(t)) })
	t.Run("a session gets one task", func(t *testing.T) { bound(t, open(t)) })
	t.Run("a session ends once", func(t *testing.T) { finished(t, open(t)) })
	t.Run("each session is due once", func(t *testing.T) { due(t, open(t)) })
	t.Run("sessions expire after their newest segment", func(t *testing.T) { expired(t, open(t)) })
	t.Run("the sessions of a run are deleted", func(t *testing.T) { runDeleted(t, open(t)) })
	t.Run("responses are kept until they are deleted or their session expires", func(t *testing.T) { responses(t, open(t)) })
	t.Run("API keys have unique names and hashes", func(t *testing.T) { uniqueKeys(t, open(t)) })
	t.Run("each change of the API keys makes a revision", func(t *testing.T) { revisions(t, open(t)) })
	t.Run("concurrent changes of API keys are all stored", func(t *testing.T) { concurrentKeys(t, open(t)) })
	t.Run("API keys are listed in pages", func(t *testing.T) { pages(t, open(t)) })
	t.Run("the last use of an API key is recorded", func(t *testing.T) { uses(t, open(t)) })
	t.Run("expired API keys are deleted", func(t *testing.T) { expiredKeys(t, open(t)) })
}

func returned(t *testing.T, store gateway.Store) {
	t.Helper()
	now := time.Now()
	a, b, c := segment("sess-1", "s0", "", "aaaa", now), segment("sess-1", "s1", "s0", "bbbbcccc", now), segment("sess-1", "s2", "s1", "dddd", now)
	for _, call := range []struct {
		session  string
		segments []*gateway.Segment
		first    int
	}{{"sess-1", []*gateway.Segment{a, b}, 0}, {"sess-2", []*gateway.Segment{segment("sess-2", "s0", "", "eeee", now)}, 0}, {"sess-1", []*gateway.Segment{c}, 2}} {
		if first, err := store.Append(t.Context(), call.session, run, call.segments); err != nil || first != call.first {
			t.Fatalf("append to %s: %d, %v; want %d", call.session, first, err, call.first)
		}
	}
	for from, want := range [][]*gateway.Segment{{a, b, c}, {b, c}, {c}, nil} {
		got, err := store.Session(t.Context(), "sess-1", from)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.EqualFunc(got.GetSegments(), want, func(x, y *gateway.Segment) bool { return proto.Equal(x, y) }) {
			t.Errorf("from %d: got %v, want %v", from, got.GetSegments(), want)
		}
	}
}

func once(t *testing.T, store gateway.Store) {
	t.Helper()
	now := time.Now()
	a, b := segment("sess-1", "s0", "", "aaaa", now), segment("sess-1", "s1", "s0", "bbbb", now)
	if _, err := store.Append(t.Context(), "sess-1", run, []*gateway.Segment{a, b}); err != nil {
		t.Fatal(err)
	}
	again := segment("sess-1", "s1", "s0", "bbbb", now.Add(time.Second)) // another request with the same tokens
	c := segment("sess-1", "s2", "s1", "cccc", now)
	if first, err := store.Append(t.Context(), "sess-1", run, []*gateway.Segment{again, c}); err != nil || first != 2 {
		t.Fatalf("%d, %v", first, err)
	}
	d, other := segment("sess-1", "s3", "s2", "dddd", now), segment("sess-1", "s1", "s0", "xxxx", now)
	if _, err := store.Append(t.Context(), "sess-1", run, []*gateway.Segment{d, other}); !errors.Is(err, gateway.ErrSegmentConflict) {
		t.Fatalf("got %v", err)
	}
	got, err := store.Session(t.Context(), "sess-1", 0)
	if err != nil || len(got.GetSegments()) != 3 || !proto.Equal(got.GetSegments()[1], b) || !proto.Equal(got.GetSegments()[2], c) {
		t.Fatalf("got %v, %v", got, err)
	}
}

func concurrent(t *testing.T, store gateway.Store) {
	t.Helper()
	const writers, each = 4, 8
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				if _, err := store.Append(t.Context(), "sess-1", run, []*gateway.Segment{segment("sess-1", fmt.Sprintf("s%d-%d", w, i), "", "aaaa", time.Now())}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for from := range writers * each {
		got, err := store.Session(t.Context(), "sess-1", from)
		if err != nil || len(got.GetSegments()) != writers*each-from {
			t.Fatalf("from %d: %d segments, %v", from, len(got.GetSegments()), err)
		}
	}
}

// mixed appends to one closed session, one with a different segment, and many others.
func mixed(t *testing.T, store gateway.Store) {
	t.Helper()
	const sessions = 32
	now := time.Now()
	for _, name := range []string{"sess-closed", "sess-conflict", "sess-duplicate"} {
		if _, err := store.Append(t.Context(), name, run, []*gateway.Segment{segment(name, "s0", "", "aaaa", now)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := store.Finish(t.Context(), "sess-closed", &gateway.End{}, now); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	add := func(session, owner, ids string, want error) {
		wg.Go(func() {
			_, err := store.Append(t.Context(), session, owner, []*gateway.Segment{segment(session, "s0", "", ids, now), segment(session, "s1", "s0", ids, now)})
			if !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", session, err, want)
			}
		})
	}
	for i := range sessions {
		add(fmt.Sprintf("sess-%d", i), run, "aaaa", nil)
		switch i % 4 {
		case 0:
			add("sess-closed", run, "bbbb", gateway.ErrSessionClosed)
		case 1:
			add("sess-conflict", run, "bbbb", gateway.ErrSegmentConflict)
		case 2:
			add("sess-duplicate", run, "aaaa", nil)
		case 3:
			add("sess-conflict", "run-2", "aaaa", gateway.ErrSessionRun)
		}
	}
	wg.Wait()
	want := map[string]int{"sess-closed": 1, "sess-conflict": 1, "sess-duplicate": 2}
	for i := range sessions {
		want[fmt.Sprintf("sess-%d", i)] = 2
	}
	for session, n := range want {
		if got, err := store.Session(t.Context(), session, 0); err != nil || len(got.GetSegments()) != n {
			t.Errorf("%s has %d segments, %v; want %d", session, len(got.GetSegments()), err, n)
		}
	}
}

// invalid appends segments with a NUL in their id, which PostgreSQL refuses.
func invalid(t *testing.T, store gateway.Store) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range 32 {
		session := fmt.Sprintf("sess-%d", i)
		wg.Go(func() {
			if _, err := store.Append(t.Context(), session, run, []*gateway.Segment{segment(session, "s0", "", "aaaa", time.Now())}); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			_, _ = store.Append(t.Context(), "sess-nul", run, []*gateway.Segment{segment("sess-nul", fmt.Sprintf("s%d\x00", i), "", "aaaa", time.Now())})
		})
	}
	wg.Wait()
}

func expired(t *testing.T, store gateway.Store) {
	t.Helper()
	now := time.Now()
	add := func(session string, ages ...time.Duration) {
		for i, age := range ages {
			if _, err := store.Append(t.Context(), session, run, []*gateway.Segment{segment(session, fmt.Sprintf("s%d", i), "", "aaaa", now.Add(-age))}); err != nil {
				t.Fatal(err)
			}
		}
	}
	add("sess-active", 3*time.Hour, 2*time.Hour, 0)
	for i := range 100 {
		add(fmt.Sprintf("sess-old-%d", i), 3*time.Hour, 2*time.Hour)
	}
	add("sess-recent", time.Minute)
	for _, want := range []int{100, 0} {
		if got, err := store.Expire(t.Context(), now.Add(-time.Hour)); err != nil || got != want {
			t.Errorf("deleted %d sessions, %v; want %d", got, err, want)
		}
	}
	for session, want := range map[string]int{"sess-active": 3, "sess-recent": 1, "sess-old-0": 0, "sess-old-99": 0} {
		if got, err := store.Session(t.Context(), session, 0); len(got.GetSegments()) != want || errors.Is(err, gateway.ErrSession) != (want == 0) {
			t.Errorf("%s has %d segments, %v", session, len(got.GetSegments()), err)
		}
	}
	add("sess-old-0", 0) // its segments are gone too
	if got, err := store.Session(t.Context(), "sess-old-0", 0); err != nil || len(got.GetSegments()) != 1 {
		t.Errorf("got %v, %v", got, err)
	}
}

// runDeleted deletes more sessions than one transaction does, and leaves those of another run.
func runDeleted(t *testing.T, store gateway.Store) {
	t.Helper()
	for n := range 150 {
		name := fmt.Sprintf("sess-%03d", n)
		of := run
		if n == 70 {
			of = "run-2"
		}
		if _, err := store.Append(t.Context(), name, of, []*gateway.Segment{segment(name, "s0", "", "aaaa", time.Now())}); err != nil {
			t.Fatal(err)
		}
	}
	if err := store.KeepResponse(t.Context(), &gateway.Response{ID: "resp-1", Session: "sess-000", Body: []byte("{}"), Input: []byte("[]")}); err != nil {
		t.Fatal(err)
	}
	if err := store.DeleteRun(t.Context(), "run-other", fencetest.Scheduler(1, 2)); err != nil {
		t.Fatal(err)
	}
	if err := store.DeleteRun(t.Context(), run, fencetest.Scheduler(1, 1)); !errors.Is(err, fence.ErrFenced) {
		t.Errorf("a former scheduler deletes sessions: %v", err)
	}
	if err := store.DeleteRun(t.Context(), run, fencetest.Scheduler(1, 2)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"sess-000", "sess-149"} {
		if _, err := store.Session(t.Context(), name, 0); !errors.Is(err, gateway.ErrSession) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := store.Response(t.Context(), "resp-1"); !errors.Is(err, gateway.ErrResponse) {
		t.Errorf("its response: %v", err)
	}
	_, appended := store.Append(t.Context(), "sess-late", run, []*gateway.Segment{segment("sess-late", "s0", "", "aaaa", time.Now())})
	_, issued := store.Issue(t.Context(), run, []*gateway.Task{{SessionId: "sess-late", Key: &trajectoryv1.TrajectoryKey{RunId: run}}})
	for what, err := range map[string]error{"append": appended, "issue": issued} {
		if !errors.Is(err, fence.ErrDeleted) {
			t.Errorf("%s after the deletion: %v", what, err)
		}
	}
	if _, err := store.Session(t.Context(), "sess-late", 0); !errors.Is(err, gateway.ErrSession) {
		t.Errorf("a late session: %v", err)
	}
	if got, err := store.Session(t.Context(), "sess-070", 0); err != nil || len(got.GetSegments()) != 1 {
		t.Errorf("the session of another run: %v, %v", got, err)
	}
}
