package scheduler

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/rollout-rl/rollout/libs/atomicfile"
	"github.com/rollout-rl/rollout/libs/worker"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// supervisors makes one supervisor a worker of the run: the inference workers of the plan, one learner, and one worker for each
// reward model.
func (c *conductor) supervisors(run *Run) []*launch.Supervisor {
	limits := c.svc.cfg.Worker.Limits
	plan := run.GetPlan().GetConfig().GetLimits()
	limits.Restarts = int(plan.GetWorkerRestarts())
	if limits.StartTimeout == 0 {
		limits.StartTimeout = time.Duration(plan.GetWorkerStartSeconds() * float64(time.Second))
	}
	var out []*launch.Supervisor
	add := func(kind worker.Kind, number int) {
		limits := limits
		limits.StopGrace = cmp.Or(limits.StopGrace, kind.StopGrace)
		id := kind.Name + "-" + strconv.Itoa(number)
		c.update(func(v *view) { v.crowd.put(id, workerView{kind: kind.Name}) })
		out = append(out, &launch.Supervisor{
			Worker: id, Launcher: c.svc.Launcher, Limits: limits, Observer: c,
			Prepare: func(context.Context) (launch.Command, error) { return c.command(id, kind) },
			Registered: func(ctx context.Context, process string) error {
				return c.until(ctx, id, func(w workerView) bool { return w.process == process && w.healthy() })
			},
			Absent: func(ctx context.Context, process string, timeout time.Duration) error {
				return c.absent(ctx, id, process, timeout)
			},
		})
	}
	for _, kind := range supervised(run) {
		for n := range kind.Count(run.GetPlan().GetConfig()) {
			add(kind, n)
		}
	}
	return out
}

// supervised are the kinds of which the run has workers.
func supervised(run *Run) []worker.Kind {
	return slices.DeleteFunc(slices.Clone(worker.Kinds), func(k worker.Kind) bool {
		return k.Count == nil || k.Count(run.GetPlan().GetConfig()) == 0
	})
}

// command writes the worker's spec and gives the command that starts it.
func (c *conductor) command(id string, kind worker.Kind) (launch.Command, error) {
	run, w := c.record(), c.svc.cfg.Worker
	spec := c.spec(run, id, kind)
	spec.Nonce = worker.NewNonce()
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(spec)
	if err != nil {
		return launch.Command{}, fmt.Errorf("write the spec of %s: %w", id, err)
	}
	c.update(func(v *view) {
		if w, supervised := v.crowd.workers[id]; supervised {
			w.nonce, w.address = spec.GetNonce(), ""
			v.crowd.put(id, w)
		}
	})
	base := filepath.Join(run.GetDirectory(), "workers", id)
	if err := atomicfile.Write(base+".json", text, 0o600); err != nil {
		return launch.Command{}, fmt.Errorf("write the spec of %s: %w", id, err)
	}
	env := append(slices.Clone(w.Env), "ROLLOUT_WORKER_SPEC="+base+".json", "OMP_NUM_THREADS="+strconv.Itoa(int(spec.GetThreads())))
	if !kind.Detached {
		env = append(env, w.BusEnv...)
	}
	env = append(env, waiting(run, c.svc.conducted() == 1)...)
	return launch.Command{Args: append(slices.Clone(w.Command), kind.Name), Env: env, Log: base + ".log"}, nil
}

func (c *conductor) spec(run *Run, id string, kind worker.Kind) *runv1.WorkerSpec {
	w := c.svc.cfg.Worker
	spec := &runv1.WorkerSpec{
		WorkerId: id, Kind: kind.Name, RunId: run.GetRunId(), Plan: run.GetPlan(), BaseDir: run.GetBaseDir(), RunDirectory: run.GetDirectory(),
		NatsUrl: w.NATSURL, NatsToken: w.NATSToken, Nats: w.NATS, ConsulAddress: w.ConsulAddress, ConsulToken: w.ConsulToken, Token: w.Token,
		ConsulCaFile: w.Consul.CA, ConsulCertFile: w.Consul.Cert, ConsulKeyFile: w.Consul.Key, Tls: w.TLS,
		Incarnation: run.GetIncarnation(), Threads: kind.CPUThreads(run.GetPlan().GetConfig(), w.Cores), OtlpEndpoint: w.OTLPEndpoint,
	}
	if kind.Detached {
		spec.NatsToken, spec.Nats = "", nil
	}
	if kind.LoadsWeights {
		spec.InitialWeights, spec.InitialVersion = c.newestWeights(run)
	}
	return spec
}

// waiting is how a worker's OpenMP threads wait for their next loop. Where engine and learner work at the same time they must
// sleep, as threads that spin starve those of the other process. Where the two alternate a short spin is worth it: a small
// model's loops follow each other faster than a thread falls asleep and wakes (on two cores a step took 0.7 to 0.9 of the time).
// Not beside another run: of two that spin, each waited for threads that the other kept from the cores, and took 7 times as long.
func waiting(run *Run, alone bool) []string {
	if run.GetPlan().GetConfig().GetMode() == "async" || !alone {
		return []string{"OMP_WAIT_POLICY=PASSIVE"}
	}
	return []string{"OMP_WAIT_POLICY=PASSIVE", "GOMP_SPINCOUNT=50000"} // about 2 ms
}

var versionFolder = regexp.MustCompile(`^v(\d+)$`)

// newestWeights is the folder and version that an inference worker should begin with, so that one that is started in mid-run
// serves the current weights when it registers. Empty: the plan's model.
func (c *conductor) newestWeights(run *Run) (folder string, version uint64) {
	folder = run.GetWeightsDirectory()
	if w := c.progress().GetWeights(); w.GetDirectory() != "" {
		folder = w.GetDirectory()
	}
	m := versionFolder.FindStringSubmatch(filepath.Base(folder))
	if m == nil {
		return "", 0
	}
	if _, err := os.Stat(folder); err != nil {
		return "", 0
	}
	version, err := strconv.ParseUint(m[1], 10, 64)
	if err != nil {
		return "", 0
	}
	return folder, version
}

// verifyWorkers reports which registrations belong to the newest launch of their worker.
func (c *conductor) verifyWorkers(registrations []*runv1.WorkerRegistration) []bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	accepted := make([]bool, len(registrations))
	for n, r := range registrations {
		claim := worker.Registration{Worker: r.GetWorkerId(), Rank: int(r.GetRank()), Address: r.GetAddress(), Proof: r.GetProof()}
		accepted[n] = claim.Valid(c.view.crowd.workers[r.GetWorkerId()].nonce)
	}
	return accepted
}

// watchRegistry takes the registered workers of a kind into the view.
func (c *conductor) watchRegistry(ctx context.Context, kind worker.Kind) error {
	incarnation := fmt.Sprint(c.record().GetIncarnation())
	for list := range c.svc.Registry.Watch(ctx, kind.Service()) {
		c.update(func(v *view) {
			here := map[string]worker.Registration{}
			for _, in := range list {
				if r := worker.RegistrationOf(in); in.Meta[worker.MetaRun] == c.id && in.Meta[worker.MetaIncarnation] == incarnation && r.Rank == 0 {
					here[r.Worker] = r
				}
			}
			for id, w := range v.crowd.workers {
				if w.kind == kind.Name {
					if w.address = ""; here[id].Valid(w.nonce) {
						w.address = here[id].Address
					}
					w.served = w.served || w.healthy()
					v.crowd.put(id, w)
				}
			}
		})
	}
	return nil
}

// absent waits until the process of a worker has been missing from the registry for the timeout.
func (c *conductor) absent(ctx context.Context, id, process string, timeout time.Duration) error {
	serves := func(w workerView) bool { return w.process == process && w.healthy() }
	for {
		if err := c.until(ctx, id, func(w workerView) bool { return !serves(w) }); err != nil {
			return err
		}
		waiting, cancel := context.WithTimeout(ctx, timeout)
		err := c.until(waiting, id, serves)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return nil
		}
	}
}

// until waits until a worker is as wanted.
func (c *conductor) until(ctx context.Context, id string, wanted func(workerView) bool) error {
	for {
		c.mu.Lock()
		changed := c.view.crowd.changes(id)
		reached := wanted(c.view.crowd.workers[id])
		c.mu.Unlock()
		if reached {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// Started implements launch.Observer.
func (c *conductor) Started(id string, p launch.Process, restarts int) {
	c.change(id, func(w *workerView) {
		w.process, w.pid, w.restarts, w.why, w.status, w.served = p.ID(), launch.PID(p), restarts, "", nil, false
	})
	c.svc.emit(c.record(), &eventv1.Event{
		Kind: "worker.started", Level: eventv1.Level_LEVEL_INFO, Step: c.progress().GetStep(),
		Message:    fmt.Sprintf("%s started as %s", id, p.ID()),
		Attributes: processAttributes(id, p, "restarts", strconv.Itoa(restarts)),
	})
}

// Exited implements launch.Observer.
func (c *conductor) Exited(id string, p launch.Process, exit launch.Exit, why string) {
	c.change(id, func(w *workerView) { w.process, w.pid, w.why, w.status = "", 0, why, nil })
	c.svc.emit(c.record(), &eventv1.Event{
		Kind: "worker.exited", Level: eventv1.Level_LEVEL_ERROR, Step: c.progress().GetStep(), Message: id + " " + why,
		Attributes: processAttributes(id, p, "exit_code", strconv.Itoa(exit.Code), "signal", exit.Signal,
			"last_lines", strings.Join(exit.LastLines, "\n")),
	})
}

// processAttributes are the attributes of an event about a process, which is nil if it could not be started.
func processAttributes(worker string, p launch.Process, more ...string) map[string]string {
	attributes := map[string]string{"worker": worker}
	for pair := range slices.Chunk(more, 2) {
		attributes[pair[0]] = pair[1]
	}
	if p != nil {
		attributes["process"] = p.ID()
		if pid := launch.PID(p); pid != 0 {
			attributes["pid"] = strconv.Itoa(pid)
		}
	}
	return attributes
}

func (c *conductor) change(id string, change func(*workerView)) {
	c.update(func(v *view) {
		w := v.crowd.workers[id]
		change(&w)
		v.crowd.put(id, w)
	})
}
