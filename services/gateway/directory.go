package gateway

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	workers "github.com/rollout-rl/rollout/libs/worker"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// directory is the launched inference workers that are up.
type directory struct {
	dial func(run string, incarnation uint32, address string) (Conn, error)
	log  *slog.Logger
	now  func() time.Time
	// projects decides which runs a caller sees; nil: all
	projects *apikey.Projects

	mu      sync.Mutex
	workers map[string]*worker // by id
	queue   queue
	closed  bool
	flight  sync.WaitGroup // requests in flight; none is added once closed
}

func newDirectory(deps Deps) *directory {
	return &directory{dial: deps.Dial, log: deps.Log, now: deps.Now, projects: deps.Projects, workers: map[string]*worker{}, queue: queue{poll: make(chan struct{})}}
}

// drainTimeout is how long requests in flight may take after their worker left the registry.
const drainTimeout = 10 * time.Second

type worker struct {
	run         string
	incarnation uint32
	client      inferencev1.InferenceWorkerServiceClient
	cancel      context.CancelFunc // closes its connection
	cache       cache              // what it has of sessions

	// The lock of the directory guards these.
	candidate
	model string // empty until the worker has reported it
	left  bool   // whether it is out of the registry and drains
}

// serve follows the registry until ctx ends.
func (d *directory) serve(ctx context.Context, instances <-chan []discovery.Instance) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for list := range instances {
		d.mu.Lock()
		gone := d.workers
		d.workers = map[string]*worker{}
		for _, in := range list {
			key := in.Address + "/" + in.Meta["process"]
			if w, ok := gone[key]; ok {
				d.workers[key] = w
				delete(gone, key)
				continue
			}
			conn, err := d.dial(in.Meta["run"], workers.IncarnationOf(in), in.Address)
			if err != nil {
				d.log.WarnContext(ctx, "dialing an inference worker failed", "address", in.Address, "error", err)
				continue
			}
			life, cancel := context.WithCancel(ctx)
			w := &worker{
				run: in.Meta["run"], incarnation: workers.IncarnationOf(in), client: inferencev1.NewInferenceWorkerServiceClient(conn),
				cancel: cancel, candidate: candidate{id: key, since: d.now(), reserved: in.Meta["reserved"] == "true"},
			}
			d.workers[key] = w
			wg.Go(func() {
				defer func() { _ = conn.Close() }()
				d.follow(life, w)
			})
		}
		for _, w := range gone {
			w.leave()
		}
		d.dispatch()
		d.mu.Unlock()
	}
}

// leave closes the connection of a worker that left the registry, after its requests in flight.
func (w *worker) leave() {
	w.left = true
	if w.completions == 0 {
		w.cancel()
		return
	}
	time.AfterFunc(drainTimeout, w.cancel)
}

// enter counts a request until the caller calls leave. It refuses requests once the directory is
// closed.
func (d *directory) enter() (leave func(), err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, ErrNoWorker
	}
	d.flight.Add(1)
	return d.flight.Done, nil
}

// close refuses new requests, and returns when those in flight or ctx have ended.
func (d *directory) close(ctx context.Context) {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	idle := make(chan struct{})
	go func() {
		d.flight.Wait()
		close(idle)
	}()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}

// How often a worker is asked for its status: until it has answered once, then, and while requests
// wait for a version.
const (
	pollFirst   = 200 * time.Millisecond
	pollUsual   = 2 * time.Second
	pollVersion = 100 * time.Millisecond
)

// follow keeps the name of the policy, the weights version, and the number of slots of a worker up
// to date.
func (d *directory) follow(ctx context.Context, w *worker) {
	for {
		pause := d.refresh(ctx, w)
		d.mu.Lock()
		poll := d.queue.poll
		if d.queue.versions > 0 {
			pause = min(pause, pollVersion)
		}
		d.mu.Unlock()
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-poll:
			timer.Stop()
		}
	}
}

// refresh asks a worker for its status, and returns when to ask again.
func (d *directory) refresh(ctx context.Context, w *worker) time.Duration {
	status, err := w.status(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil && w.model == "" {
		return pollFirst
	}
	if err == nil {
		w.model, w.slots = cmp.Or(status.GetModel(), w.run), int(status.GetSlots())
		w.version, w.paused = status.GetReceipt().GetVersion(), status.GetPaused()
		d.dispatch()
	}
	return pollUsual
}

// refreshAll asks all workers of a run for their status.
func (d *directory) refreshAll(ctx context.Context, run string) {
	d.mu.Lock()
	workers := d.serving()[run]
	d.mu.Unlock()
	var wg sync.WaitGroup
	for _, w := range workers {
		wg.Go(func() { d.refresh(ctx, w) })
	}
	wg.Wait()
}

// observe records the weights version that a worker has sampled a token with.
func (d *directory) observe(w *worker, version uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if version > w.version {
		w.version = version
		d.dispatch()
	}
}

// serving returns the workers of the newest incarnation of each run, by run. The caller has the
// lock.
func (d *directory) serving() map[string][]*worker {
	runs := map[string][]*worker{}
	for _, w := range d.workers {
		if w.model == "" {
			continue
		}
		known := runs[w.run]
		switch {
		case len(known) > 0 && known[0].incarnation > w.incarnation:
		case len(known) > 0 && known[0].incarnation < w.incarnation:
			runs[w.run] = []*worker{w}
		default:
			runs[w.run] = append(known, w)
		}
	}
	return runs
}

// resolve finds the run of a model. The model is a run id, or a name, which selects the newest run
// with that name; "" selects the only run. Only runs that the caller sees count.
func (d *directory) resolve(ctx context.Context, model string) (run, name string, err error) {
	d.mu.Lock()
	runs := d.serving()
	d.mu.Unlock()
	if err := d.hide(ctx, runs); err != nil {
		return "", "", err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(runs) == 0 {
		return "", "", ErrNoWorker
	}
	if model == "" && len(runs) > 1 {
		return "", "", ErrAmbiguous
	}
	for id, workers := range runs {
		if (model == "" || id == model || workers[0].model == model) && newer(id, run) {
			run, name = id, workers[0].model
		}
	}
	if run == "" {
		return "", "", ErrUnknownModel.With("model", model)
	}
	return run, cmp.Or(model, name), nil
}

// hide removes the runs that the caller does not see, and those for which this is unknown, of which
// it returns an error.
func (d *directory) hide(ctx context.Context, runs map[string][]*worker) (failed error) {
	for run := range runs {
		sees, err := d.projects.Sees(ctx, run)
		if err != nil {
			failed = err
		}
		if !sees {
			delete(runs, run)
		}
	}
	return failed
}

// newer reports whether a run or served model began after another one; "" is older than all.
func newer(one, other string) bool {
	_, began, _ := strings.Cut(one, "-")
	_, before, _ := strings.Cut(other, "-")
	return began > before
}

// cached returns how many segments of a session the worker of a run has that has most of them.
func (d *directory) cached(run, session string) (segments int) {
	d.mu.Lock()
	workers := d.serving()[run]
	d.mu.Unlock()
	for _, w := range workers {
		segments = max(segments, w.cache.known(session))
	}
	return segments
}

// versions returns the weights versions that the workers of a run serve, ascending.
func (d *directory) versions(run string) []uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return held(d.serving()[run])
}

// held returns the weights versions of workers, ascending. The caller has the lock.
func held(workers []*worker) []uint64 {
	versions := map[uint64]bool{}
	for _, w := range workers {
		versions[w.version] = true
	}
	return slices.Sorted(maps.Keys(versions))
}

// statusTimeout is how long a worker may take to report its status, so that a hanging worker does
// not block the list of models.
const statusTimeout = 2 * time.Second

func (w *worker) status(ctx context.Context) (*inferencev1.GetInferenceStatusResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	return w.client.GetInferenceStatus(ctx, &inferencev1.GetInferenceStatusRequest{})
}

// models asks one worker of each run for its status. The newest run with a name gets the name;
// older runs are listed by their id.
func (d *directory) models(ctx context.Context) []*gatewayv1.Model {
	d.mu.Lock()
	runs := d.serving()
	d.mu.Unlock()
	if err := d.hide(ctx, runs); err != nil {
		d.log.WarnContext(ctx, "the list of models lacks runs whose project is unknown", "error", err)
	}
	d.mu.Lock()
	newest, versions := map[string]string{}, map[string][]uint64{}
	for run, workers := range runs {
		versions[run] = held(workers)
		if name := workers[0].model; newer(run, newest[name]) {
			newest[name] = run
		}
	}
	d.mu.Unlock()
	var models []*gatewayv1.Model
	for run, workers := range runs {
		model := &gatewayv1.Model{Name: workers[0].model, RunId: run, CreateTime: timestamp(workers[0].since), WeightsVersions: versions[run]}
		if newest[model.GetName()] != run {
			model.Name = run
		}
		asked := workers[0]
		if at := slices.IndexFunc(workers, func(w *worker) bool { return !w.reserved }); at > 0 {
			asked = workers[at]
		}
		if status, err := asked.status(ctx); err == nil {
			model.WeightsVersion, model.WeightsDigest = status.GetReceipt().GetVersion(), status.GetReceipt().GetDigest()
			model.MaxModelLen = status.GetMaxModelLen()
		}
		models = append(models, model)
	}
	slices.SortFunc(models, func(a, b *gatewayv1.Model) int {
		return cmp.Or(cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetRunId(), b.GetRunId()))
	})
	return models
}

// lease is a worker with a request in flight.
type lease struct {
	*worker
	directory *directory
	need      need
	begun     bool
}

// begin records that the worker responds.
func (l *lease) begin() {
	if l.begun {
		return
	}
	l.begun = true
	l.directory.mu.Lock()
	defer l.directory.mu.Unlock()
	l.breaker.succeed()
	l.directory.dispatch()
}

// release ends the request with its error. canceled: the worker did not cause it.
func (l *lease) release(err error, canceled bool) {
	d := l.directory
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case canceled:
		l.breaker.cancel()
	case rpcerr.Code(err) == codes.Unavailable:
		l.breaker.fail(d.now())
	default:
		l.breaker.succeed()
	}
	l.tokens -= l.need.tokens
	l.completions -= l.need.completions
	if l.completions == 0 && l.left {
		l.cancel()
	}
	d.dispatch()
}
