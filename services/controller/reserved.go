package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/worker"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// reserved evaluates on workers that do nothing else (eval.workers), while the drive makes steps.
// They stay at the version of the last evaluation. There is one evaluation at a time. The goroutine
// of the drive calls the methods.
type reserved struct {
	settings
	fleet    *fleet // of the reserved workers
	progress *progress
	events   *reporter
	log      *slog.Logger
	retry    time.Duration
	limit    drainLimit
	life     context.Context // of evaluations; set before the first

	pending *pending    // started, and its result was not observed; nil: none
	current *evaluation // nil: none
	last    *evaluation // ended, and its result was not asked for; nil: none
}

// evaluation is one in the background.
type evaluation struct {
	step    uint64
	first   bool     // of the weights that the run starts from
	workers []string // that have its weights
	cancel  context.CancelFunc
	done    chan struct{} // closed: the result is set
	err     error
	means   map[string]float64 // nil: skipped
}

// pending is an evaluation that a restarted controller repeats.
type pending struct {
	Step    uint64 `json:"step"`
	First   bool   `json:"first,omitempty"`
	Weights []byte `json:"weights"` // WeightsManifest
}

// newReserved returns nil if the run reserves no workers. stored: the state of an earlier process.
func newReserved(s settings, cfg Config, deps Deps, p *progress, events *reporter, stored []byte, limit drainLimit, log *slog.Logger) *reserved {
	if s.cfg.GetEval().GetWorkers() == 0 {
		return nil
	}
	fleet := newFleet(s, deps.Dial, cfg.Retry, &lagging{reporter: events, progress: p})
	fleet.policy = updateRolling // a request for the version that they serve ends with that version
	r := &reserved{settings: s, fleet: fleet, progress: p, events: events, log: log, retry: cfg.Retry, limit: limit}
	if len(stored) == 0 {
		return r
	}
	if err := json.Unmarshal(stored, &r.pending); err != nil {
		log.Warn("the interrupted evaluation is not repeated", "error", err)
	}
	return r
}

// state is what a restarted controller continues from; empty without an evaluation.
func (r *reserved) state() []byte {
	if r == nil || r.pending == nil {
		return nil
	}
	text, err := json.Marshal(r.pending)
	if err != nil { // it has numbers and bytes only
		return nil
	}
	return text
}

// observed records that the result of a step is stored.
func (r *reserved) observed(step uint64) {
	if r.pending != nil && r.pending.Step == step {
		r.pending = nil
	}
}

// left returns the evaluation that an earlier process left; nil: none. Where the learner still has
// its weights, it starts by itself.
func (r *reserved) left() *pending {
	if r == nil || r.pending == nil || r.current != nil || r.last != nil {
		return nil
	}
	return r.pending
}

// repeat starts an evaluation again with the weights that it was started with. Workers that
// survived have them; without any, it is skipped.
func (r *reserved) repeat(ctx context.Context, left *pending) error {
	m := &weightsv1.WeightsManifest{}
	if err := proto.Unmarshal(left.Weights, m); err != nil {
		r.log.WarnContext(ctx, "the interrupted evaluation is not repeated", "step", left.Step, "error", err)
		r.pending = nil
		return nil
	}
	return r.start(ctx, left.Step, m, left.First)
}

// start begins to evaluate a step in the background, and returns when a worker has its weights, so
// that the learner may remove them. It waits for the evaluation before.
func (r *reserved) start(ctx context.Context, step uint64, m *weightsv1.WeightsManifest, first bool) error {
	if r.current != nil && r.current.step == step {
		return nil // the learner was lost since
	}
	if err := r.join(ctx); err != nil {
		return err
	}
	if err := r.pin(ctx, m); err != nil {
		if errors.Is(err, errNoSource) {
			r.events.skipped(step, err)
			r.observed(step)
			return nil
		}
		return fmt.Errorf("evaluate step %d: %w", step, err)
	}
	life, cancel := context.WithCancel(r.life)
	now := &evaluation{step: step, first: first, cancel: cancel, done: make(chan struct{})}
	for _, w := range r.fleet.holding(m) {
		now.workers = append(now.workers, w.name)
	}
	r.current = now
	if weights, err := proto.Marshal(m); err == nil {
		r.pending = &pending{Step: step, First: first, Weights: weights}
	}
	go func() {
		defer close(now.done)
		defer cancel()
		all, err := r.answers(life, m)
		switch {
		case errors.Is(err, errNoSource):
			r.events.skipped(step, err)
		case err != nil:
			now.err = fmt.Errorf("evaluate step %d: %w", step, err)
		default:
			now.means = r.events.evaluated(step, m, all)
		}
	}()
	return nil
}

// pin brings the reserved workers to m, and returns when one has it. errNoSource if none can get
// it.
func (r *reserved) pin(ctx context.Context, m *weightsv1.WeightsManifest) error {
	waitFor := func(workers []string, reason string) {
		r.progress.waitFor(work(fmt.Sprintf("to load weights version %d for the evaluation%s", m.GetVersion(), reason), workers...))
	}
	for {
		loaded, err := r.fleet.deliver(ctx, m, waitFor)
		if err != nil || loaded > 0 {
			return err
		}
		_, changed := r.fleet.status(m)
		r.progress.waitFor(service("scheduler", "a worker that is reserved for evaluations (scheduler starts it)"))
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// answers divides the rows of each suite among the workers that have m.
func (r *reserved) answers(ctx context.Context, m *weightsv1.WeightsManifest) ([]answers, error) {
	var all []answers
	for _, suite := range r.evaluatedSuites() {
		samples, err := r.samples(ctx, suite, m)
		if err != nil {
			return nil, err
		}
		all = append(all, answers{suite, samples})
	}
	return all, nil
}

func (r *reserved) samples(ctx context.Context, suite string, m *weightsv1.WeightsManifest) ([]*inferencev1.EvalSample, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sampling := &evalSampling{
		settings: r.settings, fleet: r.fleet, weights: m, log: r.log, retry: r.retry,
		checkSource: func() error { return r.fleet.checkSource(m) }, waitFor: func(...*waitv1.Wait) {},
	}
	workers := r.fleet.holding(m)
	parts := max(1, len(workers))
	var wg sync.WaitGroup
	var mu sync.Mutex
	var all []*inferencev1.EvalSample
	var failed error
	for part := range parts {
		var first *inferenceWorker
		if part < len(workers) {
			first = workers[part]
		}
		wg.Go(func() {
			samples, err := sampling.part(ctx, suite, first, uint32(part), uint32(parts))
			mu.Lock()
			defer mu.Unlock()
			if all = append(all, samples...); err != nil && failed == nil {
				failed = err
				cancel()
			}
		})
	}
	wg.Wait()
	sortByRow(all)
	return all, failed
}

// join waits for the evaluation in the background, and returns its error; errUnsettled if the drive
// is asked to stop and the evaluation does not end.
func (r *reserved) join(ctx context.Context) error {
	if r == nil || r.current == nil {
		return nil
	}
	if !closed(r.current.done) {
		r.progress.enter(evaluating)
		r.progress.waitFor(&waitv1.Wait{
			Subjects: r.current.workers, Evidence: fmt.Sprintf("the reserved workers to end the evaluation of step %d", r.current.step),
		})
	}
	limited, end := r.limit.with(ctx)
	defer end()
	select {
	case <-r.current.done:
	case <-limited.Done():
		return r.limit.ended(limited, limited.Err())
	}
	err := r.current.err
	r.last, r.current = r.current, nil
	return err
}

// joinOther waits for the evaluation in the background, unless it is of a step.
func (r *reserved) joinOther(ctx context.Context, step uint64) error {
	if r == nil || r.current == nil || r.current.step == step {
		return nil
	}
	return r.join(ctx)
}

// result returns an evaluation that has ended, once each; nil without one. One that failed stays
// for join.
func (r *reserved) result() *evaluation {
	if r == nil {
		return nil
	}
	if r.last == nil && r.current != nil && closed(r.current.done) && r.current.err == nil {
		r.last, r.current = r.current, nil
	}
	last := r.last
	r.last = nil
	return last
}

// stop cancels the evaluation in the background.
func (r *reserved) stop() {
	if r != nil && r.current != nil {
		r.current.cancel()
		<-r.current.done
	}
}

// setLearner sets the learner that offers weights to the reserved workers; nil: none.
func (r *reserved) setLearner(l *learner) {
	if r != nil {
		r.fleet.setLearner(l)
	}
}

// split sends the reserved workers of each list to the second channel, and the others to the first.
// It returns when lists or ctx has ended, and closes both.
func split(ctx context.Context, lists <-chan []discovery.Instance, sampling, evaluating chan<- []discovery.Instance) {
	defer close(sampling)
	defer close(evaluating)
	for list := range lists {
		kept := func(in discovery.Instance) bool { return in.Meta[worker.MetaReserved] == "true" }
		others := slices.DeleteFunc(slices.Clone(list), kept)
		list = slices.DeleteFunc(slices.Clone(list), func(in discovery.Instance) bool { return !kept(in) })
		for to, part := range map[chan<- []discovery.Instance][]discovery.Instance{sampling: others, evaluating: list} {
			select {
			case to <- part:
			case <-ctx.Done():
				return
			}
		}
	}
}
