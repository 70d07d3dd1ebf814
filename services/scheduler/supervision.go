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
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/suite"
	"github.com/rollout-rl/rollout/libs/telemetry"
	"github.com/rollout-rl/rollout/libs/worker"
	"github.com/rollout-rl/rollout/proto/gen/names"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/retry"
)

// supervision starts the workers of a run, restarts them, and verifies their registrations.
type supervision struct {
	*scope
	cfg     WorkerConfig
	alone   func() bool                                    // whether no other run is active
	weights func(run *Run) (folder string, version uint64) // that a worker loads; "": the model of the plan
	keep    bool                                           // workers may outlive this scheduler
	adopted map[string]adopted                             // workers that already run; emptied by the first supervisors
	renewal *renewal
}

func newSupervision(s *scope, cfg WorkerConfig, alone func() bool) *supervision {
	return &supervision{scope: s, cfg: cfg, alone: alone, weights: s.newestWeights, renewal: newRenewal(s, cfg.Issue)}
}

// supervised are the kinds of which the run has workers.
func supervised(run *Run) []worker.Kind {
	return slices.DeleteFunc(slices.Clone(worker.Kinds), func(k worker.Kind) bool {
		return k.Count == nil || k.Count(run.GetPlan().GetConfig()) == 0
	})
}

// supervisors makes one supervisor per worker of the run of these kinds.
func (s *supervision) supervisors(run *Run, kinds []worker.Kind) []*launch.Supervisor {
	limits := s.cfg.Limits
	plan := run.GetPlan().GetConfig().GetLimits()
	limits.Restarts = int(plan.GetWorkerRestarts())
	if limits.StartTimeout == 0 {
		limits.StartTimeout = time.Duration(plan.GetWorkerStartSeconds() * float64(time.Second))
	}
	var out []*launch.Supervisor
	for _, kind := range kinds {
		limits := limits
		limits.StopGrace = cmp.Or(limits.StopGrace, kind.StopGrace)
		for n := range kind.Count(run.GetPlan().GetConfig()) {
			id := kind.Name + "-" + strconv.Itoa(n)
			reserved := kind.Reserved(run.GetPlan().GetConfig(), n)
			now := workerView{kind: kind.Name}
			continued, running := s.adopted[id]
			if running {
				now = continued.view()
				s.announce(id, continued)
				s.renewal.follow(id, kind.Name)
			}
			now.reserved = reserved
			s.board.update(func(v *view) { v.fleet.put(id, now) })
			out = append(out, &launch.Supervisor{
				Worker: id, Launcher: s.Launcher, Limits: limits, Observer: s, Adopted: continued.process, Restarts: continued.Restarts,
				Prepare: func(ctx context.Context) (command launch.Command, err error) {
					err = s.retry.Until(ctx, retry.Awaited{Owner: names.SchedulerService, What: "the spec of " + id + " to be written (scheduler)"}, func(ctx context.Context) error {
						if s.keep { // a scheduler that leads may have adopted the worker, and its spec must stay
							if _, err := s.records.writable(ctx, s.run); err != nil {
								return err
							}
						}
						command, err = s.command(id, kind)
						return err
					})
					return command, err
				},
				Registered: func(ctx context.Context, process string) error {
					return s.board.waitForWorker(ctx, id, func(w workerView) bool { return w.process == process && w.healthy() })
				},
				Absent: func(ctx context.Context, process string, timeout time.Duration) error {
					return s.absent(ctx, id, process, timeout)
				},
			})
		}
	}
	s.adopted = nil
	return out
}

// parts are the functions that keep the workers of a run running and watch their registrations.
func (s *supervision) parts(run *Run, kinds []worker.Kind) (parts []func(context.Context) error) {
	for _, kind := range kinds {
		parts = append(parts, func(ctx context.Context) error { return s.watchRegistry(ctx, kind) })
	}
	for _, supervisor := range s.supervisors(run, kinds) {
		parts = append(parts, supervisor.Run)
	}
	return append(parts, s.renewal.run)
}

// command writes the spec of a worker and returns the command that starts it.
func (s *supervision) command(id string, kind worker.Kind) (launch.Command, error) {
	run := s.board.record()
	spec := s.spec(run, id, kind)
	s.board.update(func(v *view) {
		if w, supervised := v.fleet.workers[id]; supervised {
			w.nonce, w.address = spec.GetNonce(), ""
			v.fleet.put(id, w)
		}
	})
	base := filepath.Join(run.GetDirectory(), "workers", id)
	if err := s.credentials(spec, base); err != nil {
		return launch.Command{}, fmt.Errorf("write the credentials of %s: %w", id, err)
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(spec)
	if err != nil {
		return launch.Command{}, fmt.Errorf("write the spec of %s: %w", id, err)
	}
	if err := atomicfile.Write(base+".json", text, 0o600); err != nil {
		return launch.Command{}, fmt.Errorf("write the spec of %s: %w", id, err)
	}
	var env []string
	if !s.cfg.Elsewhere[kind.Name].OwnEnv {
		env = slices.Clone(s.cfg.Env)
	}
	env = append(env, "ROLLOUT_WORKER_SPEC="+base+".json")
	if spec.GetThreads() > 0 {
		env = append(env, "OMP_NUM_THREADS="+strconv.Itoa(int(spec.GetThreads())))
	}
	if !kind.Detached {
		env = append(env, s.cfg.BusEnv...)
	}
	env = append(env, spinning(run, s.alone())...)
	return launch.Command{Worker: id, Kind: kind.Name, Args: append(s.program(run, kind), kind.Name), Env: env, Log: base + ".log", Keep: s.keep && !kind.Detached}, nil
}

// credentials writes the files with the credentials of a worker, and refers to them in its spec.
func (s *supervision) credentials(spec *runv1.WorkerSpec, base string) error {
	peer := base + ".peer"
	own, err := s.renewal.issue(spec.GetWorkerId(), spec.GetKind())
	if err == nil {
		token := s.cfg.Issue(credential.For(spec.GetRunId(), credential.Peer, spec.GetIncarnation(), s.Now()))
		err = atomicfile.Write(peer, []byte(token+"\n"), 0o600)
	}
	spec.Token, spec.TokenFile, spec.PeerToken = config.File(own).String(), own, config.File(peer).String()
	for _, reference := range []*string{&spec.NatsToken, &spec.ConsulToken} {
		if *reference == OwnCredential {
			*reference = spec.GetToken()
		}
	}
	return err
}

// program starts a worker. An inference worker runs in the environment of its engine, if the
// configuration names one.
func (s *supervision) program(run *Run, kind worker.Kind) []string {
	python := run.GetPlan().GetConfig().GetEngine().GetPython()
	if kind.Name != worker.Inference.Name || python == "" {
		return slices.Clone(s.cfg.Command)
	}
	if !filepath.IsAbs(python) {
		python = filepath.Join(run.GetBaseDir(), python)
	}
	return []string{python, "-P", "-m", "rollout_workers"}
}

func (s *supervision) spec(run *Run, id string, kind worker.Kind) *runv1.WorkerSpec {
	w := s.cfg
	spec := &runv1.WorkerSpec{
		WorkerId: id, Kind: kind.Name, RunId: run.GetRunId(), Plan: run.GetPlan(), BaseDir: run.GetBaseDir(), RunDirectory: run.GetDirectory(),
		NatsUrl: w.NATSURL, NatsToken: w.NATSToken, Nats: w.NATS, ConsulAddress: w.ConsulAddress, ConsulToken: w.ConsulToken,
		ConsulCaFile: w.Consul.CA, ConsulCertFile: w.Consul.Cert, ConsulKeyFile: w.Consul.Key, Tls: w.TLS,
		ServicesKey: w.ServicesKey, Incarnation: run.GetIncarnation(), Threads: s.threads(run, kind), OtlpEndpoint: w.OTLPEndpoint,
		Nonce: worker.NewNonce(),
	}
	if kind.Detached {
		spec.NatsToken, spec.Nats = "", nil
	}
	spec.Reserved = s.board.workers()[id].reserved
	if kind.Name == worker.Inference.Name {
		spec.Suites = suitesOf(run.GetPlan().GetConfig())
	}
	if kind.LoadsWeights {
		spec.InitialWeights, spec.InitialVersion = s.weights(run)
	}
	return spec
}

// threads is the number of CPU threads of a worker. On another host it is the configured one, or
// that of its cores; 0: they are not known, and the worker uses all.
func (s *supervision) threads(run *Run, kind worker.Kind) uint32 {
	config := run.GetPlan().GetConfig()
	elsewhere, ok := s.cfg.Elsewhere[kind.Name]
	if !ok {
		return kind.CPUThreads(config, s.cfg.Cores)
	}
	if kind.Threads == nil {
		return 1
	}
	configured, _ := kind.Threads(config)
	return cmp.Or(configured, uint32(elsewhere.Cores))
}

// suitesOf returns the configurations of the suites that a run evaluates, by name.
func suitesOf(config *configv1.RunConfig) map[string]*configv1.RunConfig {
	suites := map[string]*configv1.RunConfig{}
	for _, name := range suite.InRun(config) {
		suites[name] = suite.Config(config, name)
	}
	return suites
}

// spinning sets how the OpenMP threads of a worker wait for their next loop. If engine and learner
// work at the same time, the threads must sleep: threads that spin take the cores from the other
// process. If the two alternate, a short spin pays: the loops of a small model follow each other
// faster than a thread falls asleep and wakes (on two cores a step took 0.7 to 0.9 of the time).
// Two runs that both spin wait for each other's threads and took 7 times as long, so threads spin
// only in a run that is alone.
func spinning(run *Run, alone bool) []string {
	if run.GetPlan().GetConfig().GetMode() == "async" || !alone {
		return []string{"OMP_WAIT_POLICY=PASSIVE"}
	}
	return []string{"OMP_WAIT_POLICY=PASSIVE", "GOMP_SPINCOUNT=50000"} // about 2 ms
}

var versionFolder = regexp.MustCompile(`^v(\d+)$`)

// newestWeights is the folder and version that a worker should load, so that one that starts in the
// middle of a run serves the current weights when it registers. Empty: the model of the plan.
func (s *scope) newestWeights(run *Run) (folder string, version uint64) {
	folder = run.GetWeightsDirectory()
	if w := s.board.progress().GetWeights(); w.GetDirectory() != "" {
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

// verify reports which registrations belong to the newest launch of their worker.
func (s *supervision) verify(registrations []*runv1.WorkerRegistration) []bool {
	accepted := make([]bool, len(registrations))
	workers := s.board.workers()
	for n, r := range registrations {
		claim := worker.Registration{Worker: r.GetWorkerId(), Rank: int(r.GetRank()), Address: r.GetAddress(), Proof: r.GetProof()}
		accepted[n] = claim.Valid(workers[r.GetWorkerId()].nonce)
	}
	return accepted
}

// watchRegistry puts the registered workers of a kind on the board.
func (s *supervision) watchRegistry(ctx context.Context, kind worker.Kind) error {
	incarnation := fmt.Sprint(s.incarnation)
	for list := range s.Registry.Watch(ctx, kind.Service()) {
		claims := map[string]worker.Registration{}
		for _, in := range list {
			if r := worker.RegistrationOf(in); in.Meta[worker.MetaRun] == s.run && in.Meta[worker.MetaIncarnation] == incarnation && r.Rank == 0 {
				claims[r.Worker] = r
			}
		}
		s.board.update(func(v *view) {
			for id, w := range v.fleet.workers {
				if w.kind != kind.Name {
					continue
				}
				if w.address = ""; claims[id].Valid(w.nonce) {
					w.address = claims[id].Address
				}
				w.served = w.served || w.healthy()
				v.fleet.put(id, w)
			}
		})
	}
	return nil
}

// watchGateway puts the URL that agents take prompts from on the board.
func (s *supervision) watchGateway(ctx context.Context) error {
	for list := range s.Registry.Watch(ctx, names.GatewayService) {
		s.board.update(func(v *view) {
			if len(list) > 0 {
				v.gateway = list[0].Meta["url"]
			}
		})
	}
	return nil
}

// absent waits until the process of a worker has been missing from the registry for the timeout.
func (s *supervision) absent(ctx context.Context, id, process string, timeout time.Duration) error {
	serves := func(w workerView) bool { return w.process == process && w.healthy() }
	for {
		if err := s.board.waitForWorker(ctx, id, func(w workerView) bool { return !serves(w) }); err != nil {
			return err
		}
		waiting, cancel := context.WithTimeout(ctx, timeout)
		err := s.board.waitForWorker(waiting, id, serves)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return nil
		}
	}
}

// Queued implements launch.Observer.
func (s *supervision) Queued(id string, p launch.Process, what launch.Awaited) {
	s.board.changeWorker(id, func(w *workerView) { w.process, w.pid, w.awaits, w.status = "", 0, what, nil })
	s.Log.Debug("a worker waits for its start", telemetry.AttrRun, s.run, "worker", id, "process", p.ID(), "reason", what.Reason)
}

// Started implements launch.Observer.
func (s *supervision) Started(id string, p launch.Process, restarts int) {
	s.board.changeWorker(id, func(w *workerView) {
		w.process, w.pid, w.restarts, w.why, w.awaits, w.status, w.served = p.ID(), launch.PID(p), restarts, "", launch.Awaited{}, nil, false
	})
	s.record(id, p, restarts)
	s.emit(&eventv1.Event{
		Kind: "worker.started", Level: eventv1.Level_LEVEL_INFO, Step: s.board.progress().GetStep(),
		Message:    fmt.Sprintf("%s started as %s", id, p.ID()),
		Attributes: processAttributes(id, p, "restarts", strconv.Itoa(restarts)),
	})
}

// Exited implements launch.Observer.
func (s *supervision) Exited(id string, p launch.Process, exit launch.Exit, why string) {
	s.board.changeWorker(id, func(w *workerView) { w.process, w.pid, w.why, w.awaits, w.status = "", 0, why, launch.Awaited{}, nil })
	level := eventv1.Level_LEVEL_ERROR
	if exit.Left != "" {
		level = eventv1.Level_LEVEL_WARN
	}
	s.emit(&eventv1.Event{
		Kind: "worker.exited", Level: level, Step: s.board.progress().GetStep(), Message: id + " " + why,
		Attributes: processAttributes(id, p, "exit_code", strconv.Itoa(exit.Code), "signal", exit.Signal,
			"last_lines", strings.Join(exit.LastLines, "\n")),
	})
}

// processAttributes are the attributes of an event about a process, which is nil if it could not be
// started.
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
