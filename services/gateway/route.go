package gateway

import (
	"encoding/binary"
	"hash/fnv"
	"slices"
	"time"
)

// Parameters of routing.
const (
	// boundedLoad is how far above the mean the load of a worker may be before requests with
	// affinity to it go to the next one (consistent hashing with bounded loads, arXiv:1608.01350).
	boundedLoad = 1.25
	// slowStart is the age at which a worker gets its full share, so that its caches fill first.
	slowStart    = 20 * time.Second
	leastShare   = 0.1 // of a new worker
	queuePerSlot = 2   // completions in flight per slot of a worker: it has the next one when a slot is free
	// breakAfter is the number of consecutive failures after which a worker gets no requests until
	// a probe succeeds. The pause before a probe doubles from breakPause to breakPauseMax.
	breakAfter    = 3
	breakPause    = time.Second
	breakPauseMax = 30 * time.Second
)

// need is what a request needs from a worker.
type need struct {
	affinity     string // requests with the same value go to the same worker; empty: to any
	tokens       int    // estimate of the tokens of prompts and completions
	completions  int
	version      *uint64         // weights version that the worker serves
	versionFloor *uint64         // oldest weights version
	avoid        map[string]bool // ids of workers that have failed the request
}

// candidate is what routing knows of a worker.
type candidate struct {
	id          string
	since       time.Time // when the gateway found it
	version     uint64    // of its weights
	slots       int       // completions that it samples at the same time; 0: unknown
	tokens      int       // in flight
	completions int       // in flight
	breaker     breaker
	reserved    bool // for evaluations: it takes only requests for the version that it serves
	paused      bool // new requests would wait in the worker, for new weights
}

// obstacle is why no worker can take a request.
type obstacle int

const (
	noObstacle obstacle = iota
	noWorker            // no worker is up
	noVersion           // no worker serves the version
	oldVersion          // all workers serve older versions
	allFailed           // all workers failed: this request, or many in a row
	allFull             // all workers have as many completions as they can take
)

// route chooses the worker of a request: the first in the order of a rendezvous hash of the
// affinity that is not overloaded, otherwise the one with the lowest load. A paused worker gets a
// request only if all of them are paused. Without a worker it returns the obstacle, and after which
// time the choice may differ without any other change (0: never).
func route(now time.Time, workers []candidate, n need) (id string, why obstacle, again time.Duration) {
	why = noWorker
	var usable []candidate
	for _, w := range workers {
		reason, pause := w.refuses(now, n)
		if reason == noObstacle {
			usable = append(usable, w)
		} else {
			why = max(why, reason)
		}
		if pause > 0 && (again == 0 || pause < again) {
			again = pause
		}
	}
	if len(usable) == 0 {
		return "", why, again
	}
	running := func(c candidate) bool { return !c.paused }
	if slices.ContainsFunc(usable, running) { // otherwise the request waits in a worker for the end of the pause
		usable = slices.DeleteFunc(usable, func(c candidate) bool { return c.paused })
	}
	var load, share float64
	for _, w := range usable {
		load += float64(w.tokens)
		share += w.share(now)
	}
	var best, near *candidate
	var highest uint64
	for i := range usable {
		w := &usable[i]
		if best == nil || w.pressure(now, n) < best.pressure(now, n) {
			best = w
		}
		limit := boundedLoad*load*w.share(now)/share + float64(n.tokens)
		if rank := rendezvous(n.affinity, w.id); n.affinity != "" && float64(w.tokens) <= limit && (near == nil || rank > highest) {
			near, highest = w, rank
		}
	}
	if near != nil {
		best = near
	}
	return best.id, noObstacle, 0
}

// refuses returns why a worker can't take a request, and when that may change by itself.
func (c candidate) refuses(now time.Time, n need) (obstacle, time.Duration) {
	if n.version != nil && *n.version != c.version {
		return noVersion, 0
	}
	if c.reserved && n.version == nil {
		return noWorker, 0
	}
	if n.versionFloor != nil && c.version < *n.versionFloor {
		return oldVersion, 0
	}
	if n.avoid[c.id] {
		return allFailed, 0
	}
	if ok, pause := c.breaker.allows(now); !ok {
		return allFailed, pause
	}
	if c.slots > 0 && c.completions > 0 && n.completions > 0 && c.completions+n.completions > queuePerSlot*c.slots {
		return allFull, 0
	}
	return noObstacle, 0
}

// share is the part of its requests that a worker gets while it is new.
func (c candidate) share(now time.Time) float64 {
	return min(1, max(leastShare, float64(now.Sub(c.since))/float64(slowStart)))
}

// pressure is the load that a worker would have with the request.
func (c candidate) pressure(now time.Time, n need) float64 {
	return float64(c.tokens+n.tokens) / c.share(now)
}

// rendezvous is the rank of a worker for an affinity. Another set of workers does not change the
// order of those that remain.
func rendezvous(affinity, worker string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(binary.AppendUvarint(nil, uint64(len(affinity))))
	_, _ = h.Write([]byte(affinity))
	_, _ = h.Write([]byte(worker))
	x := h.Sum64() // mixed, because the high bits of FNV depend little on the last bytes
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// breaker decides whether a worker that fails gets requests:
//
//	closed --breakAfter failures in a row--> open --pause--> half open --success--> closed
//	                                          ^                 | failure of the probe
//	                                          +-----------------+
type breaker struct {
	failures int       // in a row
	until    time.Time // when it is half open
	pause    time.Duration
	probing  bool // whether the probe of the half-open state is in flight
}

func (b breaker) allows(now time.Time) (ok bool, pause time.Duration) {
	if b.failures < breakAfter {
		return true, 0
	}
	if wait := b.until.Sub(now); wait > 0 {
		return false, wait
	}
	return !b.probing, 0
}

// begin counts a request.
func (b *breaker) begin() {
	b.probing = b.failures >= breakAfter
}

// succeed records a response of the worker.
func (b *breaker) succeed() { *b = breaker{} }

// cancel records that a request ended without a response.
func (b *breaker) cancel() { b.probing = false }

// fail records a failed request.
func (b *breaker) fail(now time.Time) {
	b.failures++
	if b.probing || b.failures == breakAfter {
		b.pause = min(breakPauseMax, max(breakPause, 2*b.pause))
		b.until = now.Add(b.pause)
	}
	b.probing = false
}
