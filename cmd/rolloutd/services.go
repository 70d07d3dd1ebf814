package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/cmd/internal/backend"
	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	servingv1 "github.com/rollout-rl/rollout/proto/gen/rollout/serving/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	bufferstore "github.com/rollout-rl/rollout/services/buffer/sqlstore"
	"github.com/rollout-rl/rollout/services/controller"
	controllerstore "github.com/rollout-rl/rollout/services/controller/sqlstore"
	"github.com/rollout-rl/rollout/services/gateway"
	gatewaystore "github.com/rollout-rl/rollout/services/gateway/sqlstore"
	"github.com/rollout-rl/rollout/services/planner"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/launch/keeper"
	"github.com/rollout-rl/rollout/services/scheduler/launch/local"
	schedulerstore "github.com/rollout-rl/rollout/services/scheduler/sqlstore"
	"github.com/rollout-rl/rollout/services/snapshot"
	snapshotstore "github.com/rollout-rl/rollout/services/snapshot/sqlstore"
	"github.com/rollout-rl/rollout/services/storage"
	storagestore "github.com/rollout-rl/rollout/services/storage/sqlstore"
)

// Constructors for the table in targets.go.

func newStorage(ctx context.Context, m *mesh) (hosted, error) {
	store, err := storagestore.Open(ctx, m.place)
	if err != nil {
		return hosted{}, err
	}
	artifacts, err := openArtifacts(ctx, m)
	if err != nil {
		return hosted{close: store.Close}, err
	}
	s, err := storage.New(storage.Config{
		EventAge: config.Days(m.cfg.Retention.EventsDays),
		Recent:   time.Duration(m.cfg.Retention.TelemetryRecentMinutes) * time.Minute, Fine: time.Duration(m.cfg.Retention.TelemetryFineHours) * time.Hour,
	}, storage.Deps{
		Store: store, Artifacts: artifacts, Projects: m.projects, Stream: m.bus, Log: m.logger(names.StorageService),
	})
	return hosted{service: s, close: store.Close}, err
}

func newBuffer(ctx context.Context, m *mesh) (hosted, error) {
	artifacts, err := client(m, names.StorageService, storagev1.NewArtifactServiceClient)
	if err != nil {
		return hosted{}, err
	}
	durability, commits := buffer.Power, sqldb.Full
	if m.cfg.Buffer.Durability == "process" {
		durability = buffer.Process
		if !m.replicated() { // PostgreSQL loses unsynced commits when it is killed
			commits = sqldb.Normal
		}
	}
	store, err := bufferstore.OpenWith(ctx, m.place, commits)
	if err != nil {
		return hosted{}, err
	}
	payloads, err := backend.Bucket(ctx, m.cfg.Blob, m.environ)
	if err != nil {
		return hosted{close: store.Close}, err
	}
	cfg := buffer.Config{
		Segments: segmentDir(m.cfg.SharedDir), SegmentBytes: uint64(max(0, m.cfg.Buffer.SegmentBytes)), Durability: durability,
	}
	if payloads != nil {
		cfg.Segments = segmentDir(m.cfg.StateDir) // a cache of this process
	}
	shape := func(r grpc.ServiceRegistrar) { bufferv1.RegisterBufferServiceServer(r, nil) }
	return elect(ctx, m, names.BufferService, store, shape, func(store *bufferstore.Store, epoch uint64) (*buffer.Server, error) {
		return buffer.New(cfg, buffer.Deps{
			Store: store, Bus: m.bus, Blobs: payloads, Artifacts: artifacts, Epoch: epoch, Events: m.events, Log: m.logger(names.BufferService),
		})
	})
}

func newSnapshot(ctx context.Context, m *mesh) (hosted, error) {
	artifacts, err := client(m, names.StorageService, storagev1.NewArtifactServiceClient)
	if err != nil {
		return hosted{}, err
	}
	runs, err := client(m, names.SchedulerService, runv1.NewSchedulerServiceClient)
	if err != nil {
		return hosted{}, err
	}
	ledgers, err := client(m, names.BufferService, bufferv1.NewBufferServiceClient)
	if err != nil {
		return hosted{}, err
	}
	learners, err := client(m, names.ControllerService, learnerv1.NewLearnerControllerServiceClient)
	if err != nil {
		return hosted{}, err
	}
	store, err := snapshotstore.Open(ctx, m.place)
	if err != nil {
		return hosted{}, err
	}
	bucket, err := backend.Bucket(ctx, m.cfg.Blob, m.environ)
	if err != nil {
		return hosted{close: store.Close}, err
	}
	shape := func(r grpc.ServiceRegistrar) { snapshotv1.RegisterSnapshotServiceServer(r, nil) }
	return elect(ctx, m, names.SnapshotService, store, shape, func(store *snapshotstore.Store, epoch uint64) (*snapshot.Server, error) {
		return snapshot.New(snapshot.Config{}, snapshot.Deps{
			Store: store, Artifacts: artifacts, Scheduler: runs, Buffer: ledgers, Controller: learners, Processes: newProcesses(), Bucket: bucket, Epoch: epoch, Projects: m.projects, Events: m.events, Log: m.logger(names.SnapshotService),
		})
	})
}

func newPlanner(_ context.Context, m *mesh) (hosted, error) {
	cfg := planner.Config{Python: pythonOf(m.cfg.Worker), Env: childEnv(m.cfg, m.environ), Folder: m.cfg.SharedDir}
	here := slices.Contains(m.cfg.Target, "all") || slices.Contains(m.cfg.Target, names.SchedulerService)
	if here && len(elsewhere(m.cfg.Launch)) == 0 {
		cfg.Host = hostMemory(cfg.Env) // the scheduler starts workers on its own host
	}
	s, err := planner.New(cfg)
	return hosted{service: s}, err
}

func newGateway(ctx context.Context, m *mesh) (hosted, error) {
	address, err := freeAddress(ctx, m.cfg.Gateway.Listen, lastPort(m.cfg.StateDir, "gateway"))
	if err != nil {
		return hosted{}, err
	}
	runs, err := client(m, names.SchedulerService, runv1.NewSchedulerInternalServiceClient)
	if err != nil {
		return hosted{}, err
	}
	records, err := client(m, names.SchedulerService, runv1.NewSchedulerServiceClient)
	if err != nil {
		return hosted{}, err
	}
	ledger, err := client(m, names.BufferService, bufferv1.NewBufferServiceClient)
	if err != nil {
		return hosted{}, err
	}
	store, err := gatewaystore.Open(ctx, m.place)
	if err != nil {
		return hosted{}, err
	}
	if err := importKeys(ctx, store, m.logger(names.GatewayService), m.cfg.StateDir, m.cfg.Join); err != nil {
		return hosted{close: store.Close}, err
	}
	s, err := gateway.New(gateway.Config{
		Address: address, Keys: m.keys, TrustOwner: m.cfg.Gateway.TrustsOwner(), TLS: gatewayTLS(m.cfg.Gateway.Listen, m.certs),
	}, gateway.Deps{
		Store: store, Registry: m.discovery, Scheduler: runs, Work: m.bus, Buffer: ledger, Runs: records, Projects: m.projects, Dial: dialer[gateway.Conn](m), Log: m.logger(names.GatewayService),
	})
	if err != nil {
		return hosted{close: store.Close}, err
	}
	return hosted{service: s, close: store.Close, url: s.URL()}, nil
}

func newController(ctx context.Context, m *mesh) (hosted, error) {
	ledger, err := client(m, names.BufferService, bufferv1.NewBufferServiceClient)
	if err != nil {
		return hosted{}, err
	}
	snapshots, err := client(m, names.SnapshotService, snapshotv1.NewSnapshotServiceClient)
	if err != nil {
		return hosted{}, err
	}
	runs, err := client(m, names.SchedulerService, runv1.NewSchedulerInternalServiceClient)
	if err != nil {
		return hosted{}, err
	}
	store, err := controllerstore.Open(ctx, m.place)
	if err != nil {
		return hosted{}, err
	}
	shape := func(r grpc.ServiceRegistrar) { learnerv1.RegisterLearnerControllerServiceServer(r, nil) }
	return elect(ctx, m, names.ControllerService, store, shape, func(store *controllerstore.Store, epoch uint64) (*controller.Server, error) {
		return controller.New(controller.Config{}, controller.Deps{
			Store: store, Buffer: ledger, Snapshots: snapshots, Scheduler: runs, Epoch: epoch, Registry: m.discovery, Dial: dialer[controller.Conn](m),
			Events: m.events, Log: m.logger(names.ControllerService),
		})
	})
}

func newScheduler(ctx context.Context, m *mesh) (hosted, error) {
	plans, err := client(m, names.PlannerService, planv1.NewPlannerServiceClient)
	if err != nil {
		return hosted{}, err
	}
	ledger, err := client(m, names.BufferService, bufferv1.NewBufferServiceClient)
	if err != nil {
		return hosted{}, err
	}
	learner, err := client(m, names.ControllerService, learnerv1.NewLearnerControllerServiceClient)
	if err != nil {
		return hosted{}, err
	}
	snapshots, err := client(m, names.SnapshotService, snapshotv1.NewSnapshotServiceClient)
	if err != nil {
		return hosted{}, err
	}
	sessions, err := client(m, names.GatewayService, gatewayv1.NewRolloutGatewayServiceClient)
	if err != nil {
		return hosted{}, err
	}
	log, err := client(m, names.StorageService, storagev1.NewEventServiceClient)
	if err != nil {
		return hosted{}, err
	}
	store, err := schedulerstore.Open(ctx, m.place)
	if err != nil {
		return hosted{}, err
	}
	natsToken, consulToken := m.endpoints.workerTokens(m.cfg)
	cfg := scheduler.Config{
		// A replica that takes over continues the runs of the failed leader.
		Retention: retention(m.cfg.Retention), KeepRuns: m.cfg.Retention.EndedRuns,
		StateDir: m.cfg.SharedDir, ResumeOnStart: m.cfg.Worker.ResumeOnStart || m.replicated(), Replicas: m.replicated(),
		Worker: scheduler.WorkerConfig{
			Command: workerCommand(m.cfg.Worker), Cores: m.cfg.Worker.Cores,
			Elsewhere: elsewhere(m.cfg.Launch), Env: workerEnv(m.cfg, m.endpoints, m.environ), BusEnv: busEnv(m.cfg, m.endpoints, m.environ),
			NATSURL: m.endpoints.nats, NATSToken: natsToken, NATS: workerAccess(m.cfg, m.endpoints),
			ConsulAddress: m.endpoints.consul, ConsulToken: consulToken, Consul: agentFiles(m.cfg, m.endpoints),
			Issue: m.issue, ServicesKey: m.seal.Public(), TLS: workerTLS(m.cfg.TLS), OTLPEndpoint: variable(m.environ, "OTEL_EXPORTER_OTLP_ENDPOINT"),
		},
	}
	shape := func(r grpc.ServiceRegistrar) {
		runv1.RegisterSchedulerServiceServer(r, nil)
		runv1.RegisterSchedulerInternalServiceServer(r, nil)
		runv1.RegisterPlaceServiceServer(r, nil)
		servingv1.RegisterServingServiceServer(r, nil)
	}
	program, err := os.Executable()
	if err != nil {
		return hosted{}, err
	}
	if err := checkLaunchers(m.cfg.Launch); err != nil {
		return hosted{close: store.Close}, err
	}
	keepers := &keeper.Host{Program: []string{program, keeperArgument}}
	return elect(ctx, m, names.SchedulerService, store, shape, func(store *schedulerstore.Store, epoch uint64) (*scheduler.Server, error) {
		launcher, places := launchers(m, keeper.Launcher{
			Local: local.Launcher{Log: local.LogLimits{Bytes: int64(m.cfg.Worker.LogBytes), LinesPerSecond: m.cfg.Worker.LogRate}},
			Host:  keepers, Epoch: epoch,
		})
		return scheduler.New(cfg, scheduler.Deps{
			Store: store, Planner: plans, Buffer: ledger, Controller: learner, Snapshots: snapshots, Sessions: sessions, EventLog: log, Bus: m.bus, Registry: m.discovery, Epoch: epoch,
			Launcher: launcher, Places: places,
			Dial: dialer[scheduler.Conn](m), Events: m.events, Log: m.logger(names.SchedulerService), Locks: store.Blocked,
		})
	})
}

// retention is the age at which the scheduler deletes runs, by state.
func retention(c config.Retention) map[scheduler.State]time.Duration {
	out := map[scheduler.State]time.Duration{}
	for state, days := range map[scheduler.State]int{
		scheduler.Succeeded: c.SucceededDays, scheduler.Failed: c.FailedDays, scheduler.Cancelled: c.CancelledDays,
	} {
		if days > 0 {
			out[state] = config.Days(days)
		}
	}
	return out
}

// client returns a typed client of a service, hosted here or elsewhere.
func client[C any](m *mesh, service string, make func(grpc.ClientConnInterface) C) (C, error) {
	conn, err := m.dialer.Conn(service)
	if err != nil {
		var none C
		return none, err
	}
	return make(conn), nil
}

// issue returns the credential of a worker.
func (m *mesh) issue(c credential.Claims) string { return credential.Issue(m.endpoints.token, c) }

// dialer returns DialWorker with the connection type that a service expects.
func dialer[C any](m *mesh) func(run string, incarnation uint32, address string) (C, error) {
	return func(run string, incarnation uint32, address string) (C, error) {
		var none C
		conn, err := m.dialer.DialWorker(run, incarnation, address)
		if err != nil {
			return none, err
		}
		c, ok := any(conn).(C)
		if !ok { // a connection implements these interfaces
			return none, fmt.Errorf("connection to %s is not a %T", address, none)
		}
		return c, nil
	}
}
