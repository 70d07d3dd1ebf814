package evidence_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/evidence"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/segment"
	bufferstore "github.com/rollout-rl/rollout/services/buffer/sqlstore"
	"github.com/rollout-rl/rollout/services/scheduler"
	"github.com/rollout-rl/rollout/services/scheduler/issue"
	schedulerstore "github.com/rollout-rl/rollout/services/scheduler/sqlstore"
	snapshotstore "github.com/rollout-rl/rollout/services/snapshot/sqlstore"
)

const (
	run  = "run-01jz0000000000000000000000"
	rows = 5
	size = 3
)

func digest(version uint64) string { return fmt.Sprintf("blake3-%064x", version+1) }

// quiet drops events.
type quiet struct{}

func (quiet) Emit(*eventv1.Event) {}

func (quiet) Flush(context.Context) error { return nil }

// plan takes 4 steps of 2 prompts, 3 samples each, over 5 rows.
func plan() *planv1.Plan {
	return &planv1.Plan{
		Format: 2, Config: &configv1.RunConfig{
			Name: proto.String("audited"), Mode: proto.String("sync"), Deterministic: proto.Bool(true),
			Sampling: &configv1.SamplingConfig{GroupSize: proto.Uint32(size)},
			Train:    &configv1.TrainConfig{Steps: proto.Uint64(4), GroupsPerStep: proto.Uint32(2)},
		},
		Inputs: []*planv1.Input{{Role: planv1.InputRole_INPUT_ROLE_TRAIN_DATA, Path: "train.jsonl", Rows: rows}},
	}
}

// state makes the state folder of an active run: three steps are committed, a snapshot covers the
// first, the prompt at position 3 is excluded, that at 6 is ready, and that at 7 is in flight.
// Segment 1 has step 1, segment 2 step 2, and segment 3 step 3 and position 6.
func state(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	must(t, schedule(t.Context(), folder))
	must(t, snapshots(t.Context(), folder))
	publish(t, folder)
	nats, err := bus.StartEmbedded(filepath.Join(folder, "nats"), bus.EmbeddedOptions{NoSync: true})
	must(t, err)
	defer nats.Stop()
	b, err := bus.Connect(t.Context(), bus.Options{URL: nats.URL()})
	must(t, err)
	defer b.Close()
	must(t, b.EnsureRun(t.Context(), run))
	store, err := bufferstore.Open(t.Context(), databases(folder))
	must(t, err)
	defer store.Close()
	server, err := buffer.New(buffer.Config{Segments: filepath.Join(folder, "segments"), SegmentBytes: 100}, buffer.Deps{Store: store, Bus: b, Events: quiet{}})
	must(t, err)
	life, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(life) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	live(t, server, b)
	return folder
}

func live(t *testing.T, server *buffer.Server, b *bus.Bus) {
	t.Helper()
	ctx := t.Context()
	_, err := server.OpenLedger(ctx, &bufferv1.OpenLedgerRequest{RunId: run, Config: &bufferv1.LedgerConfig{
		GroupsPerStep: 2, GroupSize: size, Order: bufferv1.LeaseOrder_LEASE_ORDER_POSITION, Rows: rows, Receipts: true, GroupAttempts: 3,
	}})
	must(t, err)
	_, err = server.RecordWeights(ctx, &bufferv1.RecordWeightsRequest{RunId: run, Version: 0, Digest: digest(0)})
	must(t, err)
	for step, positions := range [][]uint64{{0, 1}, {2}, {4, 5, 6}} {
		var all []*trajectoryv1.TrajectoryEnvelope
		for _, p := range positions {
			version := uint64(step)
			if p == 6 {
				version++
			}
			all = append(all, group(p, version)...)
		}
		must(t, b.PublishProto(ctx, names.TrajSubject(run), &trajectoryv1.TrajectoryBatch{Trajectories: all}))
		if step == 1 {
			_, err := server.ExcludeGroups(ctx, &bufferv1.ExcludeGroupsRequest{RunId: run, Reason: issue.AttemptsExhausted, Groups: []*bufferv1.GroupKey{{Index: 3, Attempt: 2}}})
			must(t, err)
		}
		leased, err := server.LeaseBatch(ctx, &bufferv1.LeaseBatchRequest{RunId: run, Step: uint64(step) + 1, WaitSeconds: 30})
		must(t, err)
		if leased.GetBatch() == nil {
			t.Fatal(leased.GetWaits())
		}
		_, err = server.CommitStep(ctx, &bufferv1.CommitStepRequest{RunId: run, Step: uint64(step) + 1, BatchId: leased.GetBatch().GetBatchId(), WeightsDigest: digest(uint64(step) + 1)})
		must(t, err)
	}
	_, err = server.TrimPayloads(ctx, &bufferv1.TrimPayloadsRequest{RunId: run, ThroughStep: 1})
	must(t, err)
}

// published is the folder of the last weights.
func published(folder string) string { return filepath.Join(folder, "runs", run, "weights", "v000003") }

// publish writes the weights of the last step as a learner does.
func publish(t *testing.T, folder string) {
	t.Helper()
	must(t, os.MkdirAll(published(folder), 0o755))
	var files []string
	for _, name := range []string{"config.json", "model.safetensors"} {
		must(t, os.WriteFile(filepath.Join(published(folder), name), []byte(name), 0o600))
		files = append(files, fmt.Sprintf(`{"path": %q, "bytes": %d, "digest": %q}`, name, len(name), blake(name)))
	}
	manifest := fmt.Sprintf(`{"version": 3, "files": [%s, {"path": "live.safetensors", "bytes": 1, "digest": ""}]}`, strings.Join(files, ", "))
	must(t, os.WriteFile(filepath.Join(published(folder), "rollout_weights.json"), []byte(manifest), 0o600))
}

// group returns the samples of a prompt, sampled by a weights version.
func group(position, version uint64) (out []*trajectoryv1.TrajectoryEnvelope) {
	for n := range uint32(size) {
		key := &trajectoryv1.TrajectoryKey{RunId: run, Epoch: uint32(position / rows), Index: position % rows, Sample: n}
		payload, err := proto.Marshal(&trajectoryv1.Trajectory{
			Key: key, TokenIds: make([]byte, 24), LossMask: []byte{0, 0, 1, 1, 1, 1},
			VersionSpans: []*trajectoryv1.VersionSpan{{Version: version, End: 4, Digest: digest(version)}},
		})
		if err != nil {
			panic(err)
		}
		out = append(out, &trajectoryv1.TrajectoryEnvelope{Payload: payload, Crc32C: segment.CRC(payload), Header: &trajectoryv1.TrajectoryHeader{
			Key: key, GroupSize: size, Outcome: trajectoryv1.Outcome_OUTCOME_COMPLETED, MinVersion: version, MaxVersion: version,
			Receipt: &weightsv1.WeightsReceipt{Version: version, Digest: digest(version)},
		}})
	}
	return out
}

func databases(folder string) sqldb.Place { return sqldb.Files(filepath.Join(folder, "db")) }

func schedule(ctx context.Context, folder string) error {
	store, err := schedulerstore.Open(ctx, databases(folder))
	if err != nil {
		return err
	}
	defer store.Close()
	_, err = store.Create(ctx, &runv1.Run{RunId: run, Name: "audited", State: scheduler.Running, Plan: plan(), Incarnation: 1, Step: 3}, "", scheduler.Cursor{Position: 8})
	return err
}

func snapshots(ctx context.Context, folder string) error {
	store, err := snapshotstore.Open(ctx, databases(folder))
	if err != nil {
		return err
	}
	defer store.Close()
	cas, err := evidence.Folder(folder).Artifacts()
	if err != nil {
		return err
	}
	kept, err := cas.PutBytes(ctx, []byte("state"))
	if err != nil {
		return err
	}
	_, err = store.Record(ctx, &snapshotv1.Snapshot{SnapshotId: "snap-1", Files: []*snapshotv1.SnapshotFile{{Path: "state.json", Digest: kept, Bytes: 5}}, RunId: run, Kind: snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE, Step: 1,
		WeightsDigest: digest(1), Cursor: &runv1.Cursor{Position: 2, Rows: rows}}, nil)
	return err
}

// spoil is one way to break a state folder.
type spoil func(t *testing.T, folder string)

// do runs SQL on a service's database.
func do(service, statement string, args ...any) spoil {
	return func(t *testing.T, folder string) {
		t.Helper()
		db, err := databases(folder).Open(t.Context(), service, sqldb.Full)
		must(t, err)
		defer db.Close()
		n, err := db.Exec(t.Context(), statement, args...)
		must(t, err)
		if n == 0 {
			t.Fatalf("nothing was spoiled by %s", statement)
		}
	}
}

// edit changes a segment file.
func edit(number uint32, change func([]byte) []byte) spoil {
	return func(t *testing.T, folder string) {
		t.Helper()
		path := segment.Path(filepath.Join(folder, "segments", run), number)
		data, err := os.ReadFile(path)
		must(t, err)
		must(t, os.WriteFile(path, change(data), 0o600))
	}
}

// chained recomputes the chain, to hide a changed step.
func chained(t *testing.T, folder string) {
	t.Helper()
	db, err := databases(folder).Open(t.Context(), "buffer", sqldb.Full)
	must(t, err)
	defer db.Close()
	link := ""
	for step := uint64(1); step <= 3; step++ {
		var batch, weights string
		must(t, db.One(t.Context(), `SELECT batch, weights_digest FROM step WHERE step = ?`, []any{step}, &batch, &weights))
		link = blake("rollout.chain.v1" + link + string(binary.LittleEndian.AppendUint64(nil, step)) + batch + weights)
		exec(t, db, `UPDATE step SET chain = ? WHERE step = ?`, link, step)
	}
	exec(t, db, `UPDATE ledger SET chain = ?`, link)
}

func exec(t *testing.T, db *sqldb.DB, statement string, args ...any) {
	t.Helper()
	_, err := db.Exec(t.Context(), statement, args...)
	must(t, err)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
