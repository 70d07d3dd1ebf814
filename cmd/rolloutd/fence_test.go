package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/id"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	"github.com/rollout-rl/rollout/proto/gen/names"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// unfenced are the calls that change something and carry no fence, with the reason: whole services,
// or methods of the others.
var unfenced = map[string]string{
	"rollout.buffer.v1.BufferService":                         "its own test has every call: services/buffer/fence_test.go",
	"rollout.inference.v1.InferenceWorkerService":             "a worker owns no data, and verifies the digest of the weights that it loads",
	"rollout.learner.v1.LearnerWorkerService":                 "a learner makes only its next step, of the batch that the ledger has recorded",
	"rollout.plugin.v1.PluginService":                         "an environment belongs to one worker process",
	"rollout.reward.v1.RewardWorkerService":                   "a judge owns no data",
	"rollout.weights.v1.WeightsService":                       "it only streams weights",
	"rollout.plan.v1.PlannerService":                          "clients decide it",
	"rollout.run.v1.SchedulerService":                         "clients decide it, and the leader of the scheduler executes it",
	"rollout.run.v1.PlaceService":                             "a place executes the orders of the leader whose stream it is, and the stream ends with the term",
	"rollout.serving.v1.ServingService":                       "clients decide it, and the leader of the scheduler executes it",
	"rollout.key.v1.ApiKeyService":                            "clients decide it",
	"rollout.key.v1.ApiKeyInternalService":                    "replicas of the gateway share one database",
	"rollout.run.v1.SchedulerInternalService/CompleteRun":     "it has its own test: services/scheduler",
	"rollout.gateway.v1.RolloutGatewayService/Complete":       "agents decide it",
	"rollout.gateway.v1.RolloutGatewayService/NextPrompts":    "agents decide it",
	"rollout.gateway.v1.RolloutGatewayService/CloseSession":   "agents decide it",
	"rollout.learner.v1.LearnerControllerService/CutRun":      "clients decide it; CreateSnapshot, which follows, carries a fence",
	"rollout.snapshot.v1.SnapshotService/TakeSnapshots":       "clients decide it; CreateSnapshot, which follows, carries a fence",
	"rollout.snapshot.v1.SnapshotService/SaveEpisodes":        "workers save their own; one of an earlier attempt or with fewer turns changes nothing",
	"rollout.snapshot.v1.SnapshotService/DropEpisodes":        "workers drop their own, of groups that have ended",
	"rollout.snapshot.v1.SnapshotService/RestoreSnapshot":     "clients decide it",
	"rollout.snapshot.v1.SnapshotService/RecoverSnapshots":    "people decide it; it adds what the bucket has",
	"rollout.snapshot.v1.SnapshotService/MaterializeSnapshot": "it writes verified files into a folder that the caller names",
	"rollout.storage.v1.EventService/AppendEvents":            "no leader decides events, and each is stored once by its id",
}

// reads are the first words of calls that change nothing.
var reads = []string{"Get", "List", "Watch", "Read", "Tail", "Query", "Stat", "Export", "Verify"}

// A leader is suspended between a decision and its call, a successor acts, and the old one
// continues: for every call between services that changes data.
func TestAFormerLeaderChangesNothing(t *testing.T) {
	t.Parallel()
	s, ctx, dir := allShape(t), deadline(t), t.TempDir()
	run := id.NewRun(testTime)
	file := []byte("state of a learner")
	if err := os.WriteFile(filepath.Join(dir, "state.bin"), file, 0o600); err != nil {
		t.Fatal(err)
	}
	learner := learnerv1.NewLearnerControllerServiceClient(s.conn(t, names.ControllerService))
	snapshots := snapshotv1.NewSnapshotServiceClient(s.conn(t, names.SnapshotService))
	artifacts := storagev1.NewArtifactServiceClient(s.conn(t, names.StorageService))
	events := storagev1.NewEventServiceClient(s.conn(t, names.StorageService))
	sessions := gatewayv1.NewRolloutGatewayServiceClient(s.conn(t, names.GatewayService))
	// data is the rows of a service that calls change; events arrive at any time.
	place := sqldb.Files(filepath.Join(s[names.SchedulerService].state, "db"))
	data := func(service string) string {
		var rows []string
		for row := range strings.Lines(sqldbtest.Dump(t, place, service)) {
			if !strings.HasPrefix(row, "event ") && !strings.HasPrefix(row, "metric ") && !strings.HasPrefix(row, "sqlite_sequence ") {
				rows = append(rows, row)
			}
		}
		return strings.Join(rows, "")
	}
	var made *snapshotv1.Snapshot
	const worker = "learner-worker"
	calls := []struct {
		method, owner, role string
		call                func(by *fencev1.Fence) error
	}{
		{"rollout.learner.v1.LearnerControllerService/StartRun", names.ControllerService, names.SchedulerService, func(by *fencev1.Fence) error {
			plan := &planv1.Plan{Format: planformat.Format, Inputs: []*planv1.Input{{Role: planv1.InputRole_INPUT_ROLE_TRAIN_DATA, Path: "rows", Digest: id.Content(file), Rows: 5}}, PlanId: id.Content([]byte("plan")), Config: &configv1.RunConfig{
				Name: proto.String("fenced"), Model: &configv1.ModelConfig{Path: proto.String("model")}, Data: &configv1.DataConfig{Train: proto.String("rows")},
				Algorithm: &configv1.AlgorithmConfig{Kind: &configv1.AlgorithmConfig_Sft{Sft: &configv1.SftConfig{}}},
				Train:     &configv1.TrainConfig{Steps: proto.Uint64(3)},
			}}
			_, err := learner.StartRun(ctx, &learnerv1.StartRunRequest{RunId: run, Plan: plan, RunDirectory: dir, Fence: by})
			for err == nil && !strings.Contains(data(names.ControllerService), "fence_leader [learner-controller ") {
				select { // the drive that has started writes once, then it waits for a learner
				case <-time.After(20 * time.Millisecond):
				case <-ctx.Done():
					t.Fatal("the drive did not write its state")
				}
			}
			return err
		}},
		{"rollout.learner.v1.LearnerControllerService/StopRun", names.ControllerService, names.SchedulerService, func(by *fencev1.Fence) error {
			_, err := learner.StopRun(ctx, &learnerv1.StopRunRequest{RunId: run, Fence: by})
			return err
		}},
		{"rollout.learner.v1.LearnerControllerService/DeleteRun", names.ControllerService, names.SchedulerService, func(by *fencev1.Fence) error {
			_, err := learner.DeleteRun(ctx, &learnerv1.DeleteRunRequest{RunId: run, Fence: by})
			return err
		}},
		{"rollout.snapshot.v1.SnapshotService/CreateSnapshot", names.SnapshotService, names.ControllerService, func(by *fencev1.Fence) error {
			resp, err := snapshots.CreateSnapshot(ctx, &snapshotv1.CreateSnapshotRequest{Directory: dir, Fence: by, Snapshot: &snapshotv1.Snapshot{
				RunId: run, Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, Step: 1,
				Files: []*snapshotv1.SnapshotFile{{Path: "state.bin", Digest: id.Content(file), Bytes: uint64(len(file))}},
			}})
			if err == nil {
				made = resp.GetSnapshot()
			}
			return err
		}},
		{"rollout.snapshot.v1.SnapshotService/AdoptEpisodes", names.SnapshotService, names.SchedulerService, func(by *fencev1.Fence) error {
			_, err := snapshots.AdoptEpisodes(ctx, &snapshotv1.AdoptEpisodesRequest{SnapshotId: made.GetSnapshotId(), RunId: run, Fence: by})
			return err
		}},
		{"rollout.snapshot.v1.SnapshotService/PinSnapshot", names.SnapshotService, names.SchedulerService, func(by *fencev1.Fence) error {
			_, err := snapshots.PinSnapshot(ctx, &snapshotv1.PinSnapshotRequest{SnapshotId: made.GetSnapshotId(), Fence: by})
			return err
		}},
		{"rollout.snapshot.v1.SnapshotService/UnpinSnapshot", names.SnapshotService, names.SchedulerService, func(by *fencev1.Fence) error {
			_, err := snapshots.UnpinSnapshot(ctx, &snapshotv1.UnpinSnapshotRequest{SnapshotId: made.GetSnapshotId(), Fence: by})
			return err
		}},
		{"rollout.snapshot.v1.SnapshotService/DeleteSnapshot", names.SnapshotService, names.SchedulerService, func(by *fencev1.Fence) error {
			_, err := snapshots.DeleteSnapshot(ctx, &snapshotv1.DeleteSnapshotRequest{SnapshotId: made.GetSnapshotId(), Fence: by})
			return err
		}},
		{"rollout.snapshot.v1.SnapshotService/DeleteRun", names.SnapshotService, names.SchedulerService, func(by *fencev1.Fence) error {
			_, err := snapshots.DeleteRun(ctx, &snapshotv1.DeleteRunRequest{RunId: run, Fence: by})
			return err
		}},
		{"rollout.storage.v1.ArtifactService/ImportArtifacts", names.StorageService, names.SnapshotService, func(by *fencev1.Fence) error {
			_, err := artifacts.ImportArtifacts(ctx, &storagev1.ImportArtifactsRequest{Files: []*storagev1.LocalFile{{Path: filepath.Join(dir, "state.bin")}}, Fence: by})
			return err
		}},
		{"rollout.storage.v1.ArtifactService/DeleteArtifacts", names.StorageService, names.SnapshotService, func(by *fencev1.Fence) error {
			_, err := artifacts.DeleteArtifacts(ctx, &storagev1.DeleteArtifactsRequest{ContentIds: []string{id.Content(file)}, Fence: by})
			return err
		}},
		{"rollout.storage.v1.ArtifactService/PutArtifact", names.StorageService, worker, func(by *fencev1.Fence) error {
			stream, err := artifacts.PutArtifact(ctx)
			if err != nil {
				return err
			}
			_ = stream.Send(&storagev1.PutArtifactRequest{Chunk: []byte("weights"), RunId: run, Fence: by}) // the answer has the error
			_, err = stream.CloseAndRecv()
			return err
		}},
		{"rollout.storage.v1.EventService/DeleteRun", names.StorageService, names.SchedulerService, func(by *fencev1.Fence) error {
			_, err := events.DeleteRun(ctx, &storagev1.DeleteRunRequest{RunId: run, Fence: by})
			return err
		}},
		{"rollout.gateway.v1.RolloutGatewayService/DeleteRun", names.GatewayService, names.SchedulerService, func(by *fencev1.Fence) error {
			_, err := sessions.DeleteRun(ctx, &gatewayv1.DeleteRunRequest{RunId: run, Fence: by})
			return err
		}},
	}
	tested := map[string]bool{}
	for _, c := range calls {
		tested[c.method] = true
		by := func(epoch uint64) *fencev1.Fence {
			return &fencev1.Fence{Incarnation: 2, Role: c.role, LeaderEpoch: epoch}
		}
		old, successor := by(4), by(5)
		if c.role == worker { // it has no lease: the next incarnation replaces it
			old, successor = by(0), by(0)
			old.Incarnation = 1
		}
		if err := c.call(successor); err != nil {
			t.Fatalf("%s of the successor: %v", c.method, err)
		}
		before := data(c.owner)
		if err := c.call(old); !fence.Refused(err) {
			t.Errorf("%s of a former leader: %v", c.method, err)
		}
		if after := data(c.owner); after != before {
			t.Errorf("a refused %s changed\n%s to\n%s", c.method, before, after)
		}
	}
	stat, err := artifacts.StatArtifacts(ctx, &storagev1.StatArtifactsRequest{ContentIds: []string{id.Content([]byte("weights"))}})
	if err != nil || stat.GetArtifacts()[0].GetExists() {
		t.Errorf("an artifact of the deleted run: %v, %v", stat, err)
	}

	for _, method := range methods() {
		service, name, _ := strings.Cut(method, "/")
		read := false
		for _, word := range reads {
			read = read || strings.HasPrefix(name, word)
		}
		if !read && !tested[method] && unfenced[method] == "" && unfenced[service] == "" {
			t.Errorf("%s is a new call that changes something: give its request a fence and add it to this test, or say why it needs none", method)
		}
	}
}

// methods lists every call of this project's services.
func methods() (all []string) {
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			service := f.Services().Get(i)
			for k := range service.Methods().Len() {
				if strings.HasPrefix(string(service.FullName()), "rollout.") {
					all = append(all, string(service.FullName())+"/"+string(service.Methods().Get(k).Name()))
				}
			}
		}
		return true
	})
	return all
}
