package gateway

import (
	"fmt"
	"testing"
	"time"
)

func ptr(v uint64) *uint64 { return &v }

// TestRoute has one case for each rule of routing.
func TestRoute(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	old := now.Add(-time.Hour)
	open := breaker{failures: breakAfter, until: now.Add(3 * time.Second)}
	halfOpen, probed := breaker{failures: breakAfter, until: now}, breaker{failures: breakAfter, until: now, probing: true}
	a, b := candidate{id: "a", since: old, version: 3}, candidate{id: "b", since: old, version: 4}
	with := func(c candidate, change func(*candidate)) candidate {
		change(&c)
		return c
	}
	cases := map[string]struct {
		workers []candidate
		need    need
		id      string
		why     obstacle
		again   time.Duration
	}{
		"no worker": {why: noWorker},
		"fewest tokens in flight": {
			workers: []candidate{with(a, func(c *candidate) { c.tokens, c.completions = 50, 9 }), with(b, func(c *candidate) { c.tokens, c.completions = 60, 1 })},
			id:      "a",
		},
		"a new worker gets less": {
			workers: []candidate{with(a, func(c *candidate) { c.tokens = 300 }), with(b, func(c *candidate) { c.since = now })},
			need:    need{tokens: 100}, id: "a",
		},
		"a new worker gets some": {
			workers: []candidate{with(a, func(c *candidate) { c.tokens = 1000 }), with(b, func(c *candidate) { c.since = now })},
			need:    need{tokens: 100}, id: "b",
		},
		"an older worker gets more": {
			workers: []candidate{with(a, func(c *candidate) { c.tokens = 300 }), with(b, func(c *candidate) { c.since = now.Add(-slowStart / 2) })},
			need:    need{tokens: 100}, id: "b",
		},
		"a pinned version":           {workers: []candidate{a, b}, need: need{version: ptr(4)}, id: "b"},
		"a version of no worker":     {workers: []candidate{a, b}, need: need{version: ptr(5)}, why: noVersion},
		"the oldest version":         {workers: []candidate{a, b}, need: need{versionFloor: ptr(4)}, id: "b"},
		"a version of the future":    {workers: []candidate{a, b}, need: need{versionFloor: ptr(5)}, why: oldVersion},
		"a worker failed":            {workers: []candidate{a, b}, need: need{avoid: map[string]bool{"a": true}}, id: "b"},
		"all workers failed":         {workers: []candidate{a}, need: need{avoid: map[string]bool{"a": true}}, why: allFailed},
		"an open breaker":            {workers: []candidate{with(a, func(c *candidate) { c.breaker = open }), b}, id: "b"},
		"all breakers are open":      {workers: []candidate{with(a, func(c *candidate) { c.breaker = open })}, why: allFailed, again: 3 * time.Second},
		"a half-open breaker":        {workers: []candidate{with(a, func(c *candidate) { c.breaker = halfOpen })}, id: "a"},
		"one probe at a time":        {workers: []candidate{with(a, func(c *candidate) { c.breaker = probed })}, why: allFailed},
		"a paused worker":            {workers: []candidate{with(a, func(c *candidate) { c.paused = true }), with(b, func(c *candidate) { c.tokens = 900 })}, id: "b"},
		"all workers are paused":     {workers: []candidate{with(a, func(c *candidate) { c.paused = true })}, id: "a"},
		"a full worker":              {workers: []candidate{with(a, func(c *candidate) { c.slots, c.completions = 2, 4 }), with(b, func(c *candidate) { c.tokens = 900 })}, need: need{completions: 1}, id: "b"},
		"all workers are full":       {workers: []candidate{with(a, func(c *candidate) { c.slots, c.completions = 2, 4 })}, need: need{completions: 1}, why: allFull},
		"an idle worker is not":      {workers: []candidate{with(a, func(c *candidate) { c.slots = 2 })}, need: need{completions: 100}, id: "a"},
		"full explains most":         {workers: []candidate{with(a, func(c *candidate) { c.slots, c.completions = 2, 4 }), with(b, func(c *candidate) { c.breaker = open })}, need: need{completions: 1}, why: allFull, again: 3 * time.Second},
		"a pin to a failed worker":   {workers: []candidate{a, b}, need: need{version: ptr(4), avoid: map[string]bool{"b": true}}, why: allFailed},
		"an unknown number of slots": {workers: []candidate{with(a, func(c *candidate) { c.completions = 1000 })}, need: need{completions: 1}, id: "a"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			id, why, again := route(now, c.workers, c.need)
			if id != c.id || why != c.why || again != c.again {
				t.Errorf("got %q, %v, %v, want %q, %v, %v", id, why, again, c.id, c.why, c.again)
			}
		})
	}
}

// A worker that leaves moves its own sessions alone, and the others spread evenly.
func TestSessionsStayWithTheirWorkers(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	var workers []candidate
	for i := range 5 {
		workers = append(workers, candidate{id: fmt.Sprint("127.0.0.1:", 9000+i), since: now.Add(-time.Hour)})
	}
	counts := map[string]int{}
	for s := range 5000 {
		n := need{affinity: fmt.Sprint("sess-", s), tokens: 10}
		before, _, _ := route(now, workers, n)
		counts[before]++
		after, _, _ := route(now, workers[:4], n)
		if before != workers[4].id && before != after {
			t.Fatalf("session %d moved from %s to %s", s, before, after)
		}
	}
	for _, w := range workers {
		if got := counts[w.id]; got < 850 || got > 1150 {
			t.Errorf("%s has %d of 5000 sessions", w.id, got)
		}
	}
}

// The load of the worker of a popular prompt is bounded.
func TestAffinityDoesNotOverload(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	workers := []candidate{{id: "a", since: now.Add(-time.Hour)}, {id: "b", since: now.Add(-time.Hour)}, {id: "c", since: now.Add(-time.Hour)}}
	for range 300 {
		id, _, _ := route(now, workers, need{affinity: "same", tokens: 100})
		for i := range workers {
			if workers[i].id == id {
				workers[i].tokens += 100
			}
		}
	}
	most := 0
	for _, w := range workers {
		most = max(most, w.tokens)
	}
	if most < 11_000 || most > 13_500 { // the mean is 10,000
		t.Errorf("loads %v", workers)
	}
}

func TestBreaker(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	var b breaker
	open := func() bool {
		ok, _ := b.allows(now)
		return !ok
	}
	for range breakAfter - 1 {
		b.begin()
		b.fail(now)
	}
	if open() {
		t.Fatal("open too early")
	}
	b.succeed()
	for range breakAfter {
		b.begin()
		b.fail(now)
	}
	for pause := breakPause; pause < 4*breakPauseMax; pause *= 2 {
		want := min(pause, breakPauseMax)
		if _, wait := b.allows(now); wait != want {
			t.Fatalf("a pause of %v, want %v", wait, want)
		}
		now = now.Add(want)
		if open() {
			t.Fatal("no probe after the pause")
		}
		b.begin()
		if !open() {
			t.Fatal("a second probe")
		}
		b.fail(now)
	}
	now = now.Add(breakPauseMax)
	b.begin()
	b.cancel()
	if open() {
		t.Fatal("no other probe after a canceled one")
	}
	b.begin()
	b.succeed()
	if open() || b != (breaker{}) {
		t.Fatalf("%+v after a successful probe", b)
	}
}
