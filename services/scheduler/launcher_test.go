package scheduler_test

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/worker"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// launcher starts workers that register at once and live until they are stopped or crashed.
type launcher struct {
	onLaunch func(*runv1.WorkerSpec) // told of each start, where it is set
	registry *registry
	mu       sync.Mutex
	commands []launch.Command
	specs    []*runv1.WorkerSpec
	running  map[int]*process
}

type process struct {
	l     *launcher
	pid   int
	proof string
	name  string
	spec  *runv1.WorkerSpec
	done  chan struct{}
	exit  launch.Exit
	once  sync.Once
}

func (l *launcher) Launch(c launch.Command) (launch.Process, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	spec := &runv1.WorkerSpec{}
	for _, e := range c.Env {
		if path, ok := strings.CutPrefix(e, "ROLLOUT_WORKER_SPEC="); ok {
			text, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			if err := protojson.Unmarshal(text, spec); err != nil {
				return nil, err
			}
		}
	}
	l.commands, l.specs = append(l.commands, c), append(l.specs, spec)
	if l.onLaunch != nil {
		defer l.onLaunch(spec)
	}
	p := &process{l: l, pid: 1000 + len(l.specs), name: spec.GetKind() + "-worker", spec: spec, done: make(chan struct{})}
	p.proof = worker.Proof(spec.GetNonce(), spec.GetWorkerId(), 0, fmt.Sprintf("host:%d", p.pid))
	if l.running == nil {
		l.running = map[int]*process{}
	}
	l.running[p.pid] = p
	l.registry.change(p.name, func(list []discovery.Instance) []discovery.Instance {
		return append(list, discovery.Instance{
			Name: p.name, ID: p.id(), Address: fmt.Sprintf("host:%d", p.pid),
			Meta: map[string]string{
				worker.MetaRun: spec.GetRunId(), worker.MetaWorker: spec.GetWorkerId(), worker.MetaIncarnation: fmt.Sprint(spec.GetIncarnation()),
				worker.MetaRank: "0", worker.MetaProof: p.proof, worker.MetaPID: "1", // as under torchrun: the process that registers is another one
			},
		})
	})
	return p, nil
}

func (p *process) id() string { return p.spec.GetRunId() + "/" + p.spec.GetWorkerId() }

func (p *process) end(e launch.Exit) {
	p.once.Do(func() {
		p.l.registry.change(p.name, func(list []discovery.Instance) (left []discovery.Instance) {
			for _, in := range list {
				if in.Meta[worker.MetaProof] != p.proof {
					left = append(left, in)
				}
			}
			return left
		})
		p.l.mu.Lock()
		delete(p.l.running, p.pid)
		p.l.mu.Unlock()
		p.exit = e
		close(p.done)
	})
}

func (p *process) ID() string            { return fmt.Sprint("process-", p.pid) }
func (p *process) PID() int              { return p.pid }
func (p *process) Done() <-chan struct{} { return p.done }
func (p *process) Exit() launch.Exit     { <-p.done; return p.exit }
func (p *process) Stop(time.Duration)    { p.end(launch.Exit{}) }

func (l *launcher) processes() (out []*process) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.running {
		out = append(out, p)
	}
	return out
}

func (l *launcher) endAll() {
	for _, p := range l.processes() {
		p.end(launch.Exit{})
	}
}

// crash ends the running process of a worker.
func (l *launcher) crash(worker string, e launch.Exit) {
	for _, p := range l.processes() {
		if p.spec.GetWorkerId() == worker {
			p.end(e)
		}
	}
}

func (l *launcher) spec(worker string, nth int) *runv1.WorkerSpec {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.specs {
		if s.GetWorkerId() == worker {
			if nth--; nth < 0 {
				return s
			}
		}
	}
	return nil
}
