package gateway

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/discovery"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// directory is the launched inference workers that are up.
type directory struct {
	dial func(address string) (Conn, error)
	log  *slog.Logger
	now  func() time.Time

	mu      sync.Mutex
	workers map[string]*worker // by address and process
	closed  bool
	flight  sync.WaitGroup // requests in flight; none is added once closed
}

func newDirectory(deps Deps) *directory {
	return &directory{dial: deps.Dial, log: deps.Log, now: deps.Now, workers: map[string]*worker{}}
}

// drainTimeout is how long requests in flight may take after their worker left the registry.
const drainTimeout = 10 * time.Second

type worker struct {
	run         string
	incarnation uint64
	client      inferencev1.InferenceWorkerServiceClient
	since       time.Time
	cancel      context.CancelFunc // closes its connection
	cache       cache              // what it has of sessions

	// The lock of the directory guards these.
	model string // empty until the worker has reported it
	load  int    // requests in flight
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
			conn, err := d.dial(in.Address)
			if err != nil {
				d.log.WarnContext(ctx, "dialing an inference worker failed", "address", in.Address, "error", err)
				continue
			}
			life, cancel := context.WithCancel(ctx)
			incarnation, _ := strconv.ParseUint(in.Meta["incarnation"], 10, 64)
			w := &worker{
				run: in.Meta["run"], incarnation: incarnation, client: inferencev1.NewInferenceWorkerServiceClient(conn),
				since: d.now(), cancel: cancel,
			}
			d.workers[key] = w
			wg.Go(func() {
				defer func() { _ = conn.Close() }()
				d.fetchModel(life, w)
				<-life.Done()
			})
		}
		for _, w := range gone {
			w.leave()
		}
		d.mu.Unlock()
	}
}

// leave closes the connection of a worker that left the registry, after its requests in flight.
func (w *worker) leave() {
	w.left = true
	if w.load == 0 {
		w.cancel()
		return
	}
	time.AfterFunc(drainTimeout, w.cancel)
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

// fetchModel asks a new worker for the name of its policy until it answers.
func (d *directory) fetchModel(ctx context.Context, w *worker) {
	for ctx.Err() == nil {
		status, err := w.status(ctx)
		if err == nil {
			d.mu.Lock()
			w.model = cmp.Or(status.GetModel(), w.run)
			d.mu.Unlock()
			return
		}
		timer := time.NewTimer(200 * time.Millisecond)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
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
// with that name; "" selects the only run.
func (d *directory) resolve(model string) (run, name string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	runs := d.serving()
	if len(runs) == 0 {
		return "", "", ErrNoWorker
	}
	if model == "" && len(runs) > 1 {
		return "", "", ErrAmbiguous
	}
	for id, workers := range runs {
		if (model == "" || id == model || workers[0].model == model) && id > run {
			run, name = id, workers[0].model
		}
	}
	if run == "" {
		return "", "", ErrUnknownModel.With("model", model)
	}
	return run, cmp.Or(model, name), nil
}

// acquire returns the worker of a run with the fewest requests in flight that is not in tried. The
// caller calls release after its request.
func (d *directory) acquire(run string, tried map[*worker]bool) (w *worker, release func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, candidate := range d.serving()[run] {
		if !tried[candidate] && (w == nil || candidate.load < w.load) {
			w = candidate
		}
	}
	if w == nil || d.closed {
		return nil, nil
	}
	w.load++
	d.flight.Add(1)
	return w, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		defer d.flight.Done()
		if w.load--; w.load == 0 && w.left {
			w.cancel()
		}
	}
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
	newest := map[string]string{}
	for run, workers := range runs {
		newest[workers[0].model] = max(newest[workers[0].model], run)
	}
	d.mu.Unlock()
	var models []*gatewayv1.Model
	for run, workers := range runs {
		model := &gatewayv1.Model{Name: workers[0].model, RunId: run, CreateTime: timestamp(workers[0].since)}
		if newest[model.GetName()] != run {
			model.Name = run
		}
		if status, err := workers[0].status(ctx); err == nil {
			model.WeightsVersion, model.WeightsDigest = status.GetReceipt().GetVersion(), status.GetReceipt().GetDigest()
			model.MaxModelLen = status.GetMaxModelLen()
		}
		models = append(models, model)
	}
	slices.SortFunc(models, func(a, b *gatewayv1.Model) int { return cmp.Compare(a.GetName(), b.GetName()) })
	return models
}
