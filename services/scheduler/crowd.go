package scheduler

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/worker"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// crowd is a run's workers as they were seen last. A ledger that changes many times a second must not cost more with each of them,
// so who waits for one worker is woken for it alone, and what is told of all of them is put together when one has changed.
type crowd struct {
	workers map[string]workerView
	signals map[string]chan struct{} // by worker, closed when it begins or ceases to serve
	told    *absence                 // nil where it must be made anew
}

// absence is what workers that do not serve are waited for.
type absence struct {
	waits   []*waitv1.Wait
	learner bool // one of them is a learner
}

// workerView is one worker as supervisor, registry and the worker itself describe it.
type workerView struct {
	kind     string
	process  string // id that the launcher gave; "" while no process runs
	pid      int    // of that process, for people; 0 where the launcher has none
	nonce    string // secret of the newest launch
	restarts int
	why      string // of the last exit
	address  string // "" until the launched process registered
	served   bool   // this process was registered once
	status   *inferencev1.GetInferenceStatusResponse
}

func (w workerView) healthy() bool {
	return w.process != "" && w.address != ""
}

func newCrowd() crowd {
	return crowd{workers: map[string]workerView{}, signals: map[string]chan struct{}{}}
}

// put takes what is known of a worker now.
func (c *crowd) put(id string, w workerView) {
	was, known := c.workers[id]
	c.workers[id] = w
	if was.status = w.status; known && was == w {
		return
	}
	c.told = nil
	if signal := c.signals[id]; signal != nil {
		close(signal)
		delete(c.signals, id)
	}
}

// changes is closed at the next change of a worker other than of its status.
func (c *crowd) changes(id string) <-chan struct{} {
	if c.signals[id] == nil {
		c.signals[id] = make(chan struct{})
	}
	return c.signals[id]
}

// mostNamed is how many workers a sentence names.
const mostNamed = 4

// absent is what the workers that do not serve yet are waited for, those with the same reason together.
func (c *crowd) absent() *absence {
	if c.told != nil {
		return c.told
	}
	c.told = &absence{}
	type cause struct{ owner, reason, what string }
	by := map[cause][]string{}
	var order []cause
	for _, id := range slices.Sorted(maps.Keys(c.workers)) {
		w := c.workers[id]
		if w.healthy() {
			continue
		}
		c.told.learner = c.told.learner || w.kind == worker.Learner.Name
		what := cause{"worker", "WORKER_LOADING", "to load the model (worker process)"}
		if w.served {
			what = cause{"worker", "WORKER_UNREGISTERED", "to come back or end: it left the registry (worker process)"}
		}
		if w.process == "" {
			what = cause{"scheduler", "WORKER_STARTING", "to be started (scheduler)"}
			if w.why != "" {
				what = cause{"scheduler", "WORKER_RESTARTING", "to be started again (scheduler): it " + w.why}
			}
		}
		if by[what] == nil {
			order = append(order, what)
		}
		by[what] = append(by[what], id)
	}
	for _, what := range order {
		c.told.waits = append(c.told.waits, &waitv1.Wait{Owner: what.owner, Reason: what.reason, Evidence: nameSome(by[what]) + " " + what.what})
	}
	return c.told
}

// nameSome lists the first ids and counts the rest.
func nameSome(ids []string) string {
	if len(ids) <= mostNamed {
		return strings.Join(ids, " and ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(ids[:mostNamed-1], ", "), len(ids)-mostNamed+1)
}
