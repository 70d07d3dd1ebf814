// Command fleet simulates the workers of one run for bench/scale.py and bench/gateway.py. It sends
// what real workers would send to the control plane, but samples nothing.
//
// The scheduler starts each worker as a shell script that writes its pid and the path of its spec
// into a fifo and waits for the end of its standard input. This process does the rest for all of
// them: registration, pulls, progress, events and trajectories over two NATS connections per
// worker, and responses to the controller. A sample takes as long as its lognormal length at a
// fixed token rate; a request of the gateway says its pace (package scripted).
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/rollout-rl/rollout/cmd/internal/scripted"
	"github.com/rollout-rl/rollout/libs/config"
	workers "github.com/rollout-rl/rollout/libs/worker"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// pace configures the speed of sampling and training.
type pace struct {
	rate   float64 // tokens a second of one slot
	mean   float64 // tokens of a completion
	sigma  float64 // of the lognormal that they are drawn from
	prompt int     // tokens of a prompt
	train  time.Duration
}

// fleet holds the workers of a run.
type fleet struct {
	pace    pace
	log     *slog.Logger
	address string // of the gRPC server that answers for each of them
	weights weights
	learner learner
	samples atomic.Uint64 // on the stream
}

func main() {
	if err := run(); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	f := &fleet{log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	fifo := flag.String("fifo", "", "where started workers write `PID SPEC` lines")
	flag.Float64Var(&f.pace.rate, "rate", 100, "tokens a second of a slot")
	flag.Float64Var(&f.pace.mean, "mean", 1000, "tokens of a completion on average")
	flag.Float64Var(&f.pace.sigma, "sigma", 0.8, "of the lognormal that lengths are drawn from")
	flag.IntVar(&f.pace.prompt, "prompt", 128, "tokens of a prompt")
	flag.DurationVar(&f.pace.train, "train", time.Second, "how long the learner takes for a step")
	address := flag.String("address", "127.0.0.1:0", "where the workers serve gRPC")
	aborts := flag.String("aborts", "", "file for the times at which requests of the gateway were aborted")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()

	listener, err := net.Listen("tcp", *address)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	aborted, err := scripted.OpenAborts(*aborts)
	if err != nil {
		return err
	}
	f.address = listener.Addr().String()
	f.learner = learner{weights: &f.weights, pace: f.pace}
	server := grpc.NewServer(grpc.MaxRecvMsgSize(256 << 20))
	inferencev1.RegisterInferenceWorkerServiceServer(server, &answers{weights: &f.weights, aborts: aborted})
	learnerv1.RegisterLearnerWorkerServiceServer(server, &f.learner)
	healthv1.RegisterHealthServer(server, health.NewServer())
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()

	in, err := os.OpenFile(*fifo, os.O_RDWR, 0) // opened for writing too, so that it has no end
	if err != nil {
		return fmt.Errorf("open the fifo: %w", err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	go func() {
		<-ctx.Done()
		_ = in.Close()
	}()
	for lines := bufio.NewScanner(in); lines.Scan(); {
		pid, path, _ := strings.Cut(lines.Text(), " ")
		wg.Go(func() {
			if err := f.work(ctx, pid, path); err != nil && ctx.Err() == nil {
				f.log.Error("a worker ended", "spec", path, "error", err)
			}
		})
	}
	return ctx.Err()
}

// read returns the secret of a reference in a spec.
func read(key, reference string) (string, error) {
	var ref config.Ref
	if err := ref.UnmarshalText([]byte(reference)); err != nil {
		return "", fmt.Errorf("%s: %w", key, err)
	}
	return ref.Read(key, os.Environ())
}

// work simulates the worker of a spec until ctx ends.
func (f *fleet) work(ctx context.Context, pid, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the spec: %w", err)
	}
	spec := &runv1.WorkerSpec{}
	if err := protojson.Unmarshal(text, spec); err != nil {
		return fmt.Errorf("read the spec %s: %w", path, err)
	}
	for key, reference := range map[string]*string{"nats_token": &spec.NatsToken, "consul_token": &spec.ConsulToken} {
		if *reference, err = read(key, *reference); err != nil {
			return fmt.Errorf("read the spec %s: %w", path, err)
		}
	}
	r := registration{spec: spec, pid: pid, address: f.address, log: f.log}
	if spec.GetKind() == workers.Learner.Name {
		r.keep(ctx)
		return nil
	}
	if spec.GetPlan().GetConfig().GetEnvironment().GetKind() == "external" { // agents sample through the gateway
		r.keep(ctx)
		return nil
	}
	w := &worker{fleet: f, spec: spec}
	if err := w.connect(); err != nil {
		return err
	}
	defer w.close()
	var registered sync.WaitGroup
	defer registered.Wait()
	registered.Go(func() { r.keep(ctx) })
	return w.run(ctx)
}
