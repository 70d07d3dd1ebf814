package main

import (
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/proto/gen/names"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// The same scenario with one process, whose services call each other in memory, and with several.
func TestShapes(t *testing.T) {
	t.Parallel()
	for name, build := range map[string]func(*testing.T) shape{"all": allShape, "seven": sevenShape, "mutual TLS": mutualShape, "postgres": postgresShape} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := build(t)
			everyServiceIsFound(t, s)
			schedulerAsksThePlanner(t, s)
			snapshotReachesStorageByBothRoads(t, s)
			gatewayAnswers(t, s)
		})
	}
}

func everyServiceIsFound(t *testing.T, s shape) {
	t.Helper()
	r := s["scheduler"].runtime()
	token, err := rpc.ReadToken(r.TokenFile)
	if err != nil {
		t.Fatal(err)
	}
	client, err := discovery.NewClient(discovery.Options{Address: r.Consul, Token: token, TLS: certificates(t, r)})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range serviceNames(targets) {
		var list []discovery.Instance
		s[name].until("register "+name, func() bool { // an elected service is registered once it leads
			list, err = client.Lookup(deadline(t), name)
			return err != nil || len(list) > 0
		})
		if err != nil || len(list) != 1 || list[0].Address != s[name].runtime().GRPC {
			t.Fatalf("%s in the registry: %+v %v", name, list, err)
		}
		conn, err := rpc.NewDialer(rpc.DialerOptions{TLS: certificates(t, r)}).Dial(list[0].Address) // health checks need no token
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		h, err := healthpb.NewHealthClient(conn).Check(deadline(t), &healthpb.HealthCheckRequest{})
		if err != nil || h.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("health of %s: %v %v", name, h, err)
		}
	}
}

func schedulerAsksThePlanner(t *testing.T, s shape) {
	t.Helper()
	_, err := runv1.NewSchedulerServiceClient(s.conn(t, "scheduler")).CreateRun(deadline(t),
		&runv1.CreateRunRequest{Lock: []byte("no plan"), BaseDir: "/"})
	if rpcerr.Reason(err) != "PLAN_UNREADABLE" { // only the planner returns this error
		t.Errorf("an invalid plan: %v", err)
	}
}

func snapshotReachesStorageByBothRoads(t *testing.T, s shape) {
	t.Helper()
	dir := t.TempDir()
	data := []byte("optimizer state")
	if err := os.WriteFile(filepath.Join(dir, "state.bin"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx := deadline(t)
	made, err := snapshotv1.NewSnapshotServiceClient(s.conn(t, "snapshot")).CreateSnapshot(ctx, &snapshotv1.CreateSnapshotRequest{
		Directory: dir,
		Snapshot: &snapshotv1.Snapshot{
			RunId: id.NewRun(testTime), Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, Step: 1,
			Files:  []*snapshotv1.SnapshotFile{{Path: "state.bin", Digest: id.Content(data), Bytes: uint64(len(data))}},
			Origin: &snapshotv1.Origin{BaseDir: dir}, // the run is unknown here, as that of an imported snapshot
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	conn := s.conn(t, "storage")
	found, err := storagev1.NewArtifactServiceClient(conn).StatArtifacts(ctx, &storagev1.StatArtifactsRequest{ContentIds: []string{id.Content(data)}})
	if err != nil || len(found.GetArtifacts()) != 1 {
		t.Errorf("the file in storage: %v %v", found, err)
	}
	tail, err := storagev1.NewEventServiceClient(conn).TailEvents(ctx, &storagev1.TailEventsRequest{
		Filter: &storagev1.EventFilter{RunId: made.GetSnapshot().GetRunId(), Kinds: []string{"snapshot.created"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := tail.Recv() // came over the bus
	if err != nil || got.GetEvents()[0].GetAttributes()["snapshot"] != made.GetSnapshot().GetSnapshotId() {
		t.Errorf("the event: %v %v", got, err)
	}
}

func gatewayAnswers(t *testing.T, s shape) {
	t.Helper()
	req, err := http.NewRequestWithContext(deadline(t), http.MethodGet, s[names.GatewayService].runtime().Gateway+"/v1/models", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("models: %s", resp.Status)
	}
}

// One service is killed and restarted, then the servers; the others find them again.
func TestAKilledProcessIsFoundAgain(t *testing.T) {
	t.Parallel()
	s := sevenShape(t)
	for _, name := range []string{"planner", "servers"} {
		d := s[name]
		d.kill()
		s[name] = start(t, d.state, d.cmd.Args[3:]...)
	}
	schedulerAsksThePlanner(t, s)
	snapshotReachesStorageByBothRoads(t, s)
	for name, d := range s { // all processes are still running
		select {
		case <-d.ended:
			t.Errorf("%s left:\n%s", name, d.log)
		default:
		}
	}
	if got := s["servers"].runtime().Targets; !slices.Equal(got, []string{natsTarget, registryTarget}) {
		t.Errorf("targets %v", got)
	}
}
