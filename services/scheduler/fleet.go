package scheduler

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/wait"
	"github.com/rollout-rl/rollout/libs/worker"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// fleet holds the observed workers of a run. The view changes many times a second, and that must
// not cost more with each worker: a waiter for one worker is woken by that worker alone, and the
// summary of all of them is made when one has changed.
type fleet struct {
	workers map[string]workerView
	signals map[string]chan struct{} // by worker, closed when it changes
	summary *absence                 // nil if a worker has changed since it was made
}

// absence summarizes the workers that do not serve.
type absence struct {
	waits   []*waitv1.Wait
	learner bool // one of them is a learner
}

// workerView is one worker as its supervisor, the registry, and the worker itself describe it.
type workerView struct {
	kind     string
	reserved bool   // for evaluations
	process  string // id that the launcher gave; "" while no process runs
	pid      int    // of that process, for people; 0 if the launcher has none
	nonce    string // secret of the newest launch
	restarts int
	why      string         // of the last exit
	awaits   launch.Awaited // what its next process waits for; empty while none is queued
	address  string         // "" until the launched process registered
	served   bool           // this process has registered before
	status   *inferencev1.GetInferenceStatusResponse
}

func (w workerView) healthy() bool {
	return w.process != "" && w.address != ""
}

func (w workerView) activity() string {
	switch {
	case w.process == "" && w.awaits.What != "":
		return "waits for " + article(w.awaits.What) + " " + w.awaits.What
	case w.process == "" && w.why != "":
		return "is being restarted: it " + w.why
	case w.process == "":
		return "is being started"
	case !w.healthy() && w.kind == worker.Environment.Name:
		return "starts and makes its environments"
	case !w.healthy():
		return "starts and loads the model"
	}
	return ""
}

func newFleet() fleet {
	return fleet{workers: map[string]workerView{}, signals: map[string]chan struct{}{}}
}

// put replaces a worker.
func (f *fleet) put(id string, w workerView) {
	was, known := f.workers[id]
	f.workers[id] = w
	if was.status = w.status; known && was == w {
		return
	}
	f.summary = nil
	if signal := f.signals[id]; signal != nil {
		close(signal)
		delete(f.signals, id)
	}
}

// changes is closed at the next change of a worker. A new status alone is not a change.
func (f *fleet) changes(id string) <-chan struct{} {
	if f.signals[id] == nil {
		f.signals[id] = make(chan struct{})
	}
	return f.signals[id]
}

// mostNamed is the number of workers that a sentence names.
const mostNamed = 4

// absent summarizes the workers of a run that do not serve, grouped by reason.
func (f *fleet) absent(run string) *absence {
	if f.summary != nil {
		return f.summary
	}
	f.summary = &absence{}
	type cause struct {
		owner, reason, what string
		awaits              launch.Awaited
	}
	by := map[cause][]string{}
	var order []cause
	for _, id := range slices.Sorted(maps.Keys(f.workers)) {
		w := f.workers[id]
		if w.healthy() {
			continue
		}
		f.summary.learner = f.summary.learner || w.kind == worker.Learner.Name
		what := cause{owner: wait.Worker, reason: wait.WorkerLoading, what: "to load the model (worker process)"}
		if w.kind == worker.Environment.Name {
			what.what = "to make environments (worker process)"
		}
		if w.served {
			what = cause{owner: wait.Worker, reason: wait.WorkerUnregistered, what: "to register again or exit: it left the registry (worker process)"}
		}
		if w.process == "" {
			switch {
			case w.awaits.What != "":
				what = cause{owner: w.awaits.Owner, reason: w.awaits.Reason, awaits: w.awaits}
			case w.why != "":
				what = cause{owner: "scheduler", reason: wait.WorkerRestarting, what: "to be restarted (scheduler): it " + w.why}
			default:
				what = cause{owner: "scheduler", reason: wait.WorkerStarting, what: "to be started (scheduler)"}
			}
		}
		if by[what] == nil {
			order = append(order, what)
		}
		by[what] = append(by[what], id)
	}
	for _, what := range order {
		ids := by[what]
		made := &waitv1.Wait{
			Owner: what.owner, Reason: what.reason, Evidence: nameSome(ids) + " " + what.what, Subjects: ids[:min(len(ids), mostSubjects)],
			Fix: fmt.Sprintf("it ends by itself; see the output of a worker with `rollout logs worker %s %s`", run, ids[0]),
		}
		if what.awaits.What != "" {
			made.Evidence, made.Fix = counted(len(ids), what.awaits.What)+" for "+nameSome(ids), what.awaits.Fix
			if what.awaits.Detail != "" {
				made.Evidence += " (" + what.awaits.Detail + ")"
			}
		}
		f.summary.waits = append(f.summary.waits, made)
	}
	return f.summary
}

func article(what string) string {
	if strings.ContainsAny(what[:1], "aeiou") {
		return "an"
	}
	return "a"
}

// counted is a number of things: "1 external learner worker", "2 external learner workers".
func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// mostSubjects is the number of workers that a wait lists.
const mostSubjects = 32

// nameSome lists the first ids and counts the rest.
func nameSome(ids []string) string {
	if len(ids) <= mostNamed {
		return strings.Join(ids, " and ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(ids[:mostNamed-1], ", "), len(ids)-mostNamed+1)
}
