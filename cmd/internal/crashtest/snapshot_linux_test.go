//go:build amd64 || arm64

package crashtest_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/rollout-rl/rollout/cmd/internal/crashtest"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/files"
	"github.com/rollout-rl/rollout/libs/blob/s3"
	"github.com/rollout-rl/rollout/libs/checkpoint"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/sqldb"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	"github.com/rollout-rl/rollout/services/snapshot"
	snapshotstore "github.com/rollout-rl/rollout/services/snapshot/sqlstore"
	"github.com/rollout-rl/rollout/services/storage"
	storagestore "github.com/rollout-rl/rollout/services/storage/sqlstore"
)

const (
	run = "run-a"
	// scratch is the folder with the state that the learner has written. No service reads it again.
	scratch = "scratch"
	// artifacts is the folder of the artifacts, if they are files.
	artifacts = "artifacts"
)

// ledger is a buffer service with the ledger of one run, which has some samples.
type ledger struct {
	grpc.ClientStream
	sent int
}

func (l *ledger) CutLedger(context.Context, *bufferv1.CutLedgerRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[bufferv1.CutLedgerResponse], error) {
	return &ledger{}, nil
}

func (l *ledger) Recv() (*bufferv1.CutLedgerResponse, error) {
	const payloads, bytes = 3, 5000
	l.sent++
	switch {
	case l.sent == 1:
		return &bufferv1.CutLedgerResponse{Ledger: &bufferv1.LedgerRecord{State: &bufferv1.LedgerState{Step: 2}}}, nil
	case l.sent <= 1+payloads:
		ref := &bufferv1.SampleRef{Offset: uint64(l.sent-2) * bytes, Length: bytes}
		payload := []byte(strings.Repeat(fmt.Sprint(l.sent), bytes))
		return &bufferv1.CutLedgerResponse{Samples: []*bufferv1.SampleRecord{{Ref: ref}}, Payloads: [][]byte{payload}}, nil
	}
	return nil, io.EOF
}

// others are the services that a creation calls for nothing that matters here.
type others struct{}

func (others) GetRun(context.Context, *runv1.GetRunRequest, ...grpc.CallOption) (*runv1.GetRunResponse, error) {
	return nil, status.Error(codes.NotFound, "the test has no runs")
}

func (others) CreateRun(context.Context, *runv1.CreateRunRequest, ...grpc.CallOption) (*runv1.CreateRunResponse, error) {
	return nil, status.Error(codes.Unimplemented, "the test has no runs")
}

func (others) CutRun(context.Context, *learnerv1.CutRunRequest, ...grpc.CallOption) (*learnerv1.CutRunResponse, error) {
	return nil, status.Error(codes.Unimplemented, "the test has no runs")
}
func (others) Of(string) ([]int, error) { return nil, nil }
func (others) Dump(context.Context, int, string, bool) (checkpoint.Image, error) {
	return checkpoint.Image{}, errors.New("the test has no processes")
}
func (others) Emit(*eventv1.Event) {}

// services are the snapshot and the storage service, with their databases in a folder.
type services struct {
	*snapshot.Server
	stop func() error
}

// open starts the services. Artifacts are objects of the bucket at endpoint; "": files.
func open(ctx context.Context, base, endpoint string) (services, error) {
	place := sqldb.Files(filepath.Join(base, "db"))
	spool := filepath.Join(base, "spool")
	var blobs blob.Store
	var err error
	if endpoint == "" {
		var local *files.Store
		if local, err = files.Open(filepath.Join(base, artifacts)); err == nil {
			blobs, spool = local, local.Spool()
		}
	} else {
		blobs, err = s3.Open(ctx, s3.Config{Bucket: "b", Endpoint: endpoint, AccessKey: "key", SecretKey: "secret", PartBytes: 4 << 10})
	}
	events, e1 := storagestore.Open(ctx, place)
	manifests, e2 := snapshotstore.Open(ctx, place)
	if err := errors.Join(err, e1, e2); err != nil {
		return services{}, err
	}
	store, err := storage.New(storage.Config{}, storage.Deps{Store: events, Artifacts: blob.NewCAS(blobs, spool)})
	if err != nil {
		return services{}, err
	}
	memory, server := bufconn.Listen(1<<20), grpc.NewServer()
	store.Register(server)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(memory) })
	dial := func(ctx context.Context, _ string) (net.Conn, error) { return memory.DialContext(ctx) }
	conn, err := grpc.NewClient("passthrough:///memory", grpc.WithContextDialer(dial), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return services{}, err
	}
	made, err := snapshot.New(snapshot.Config{}, snapshot.Deps{
		Store: manifests, Artifacts: storagev1.NewArtifactServiceClient(conn), Scheduler: others{}, Buffer: &ledger{}, Controller: others{},
		Processes: others{}, Events: others{},
	})
	return services{made, func() error {
		err := errors.Join(conn.Close(), manifests.Close())
		server.Stop()
		serving.Wait()
		return errors.Join(err, events.Close())
	}}, err
}

// create takes the snapshot of a step: of the training state, and at step 2 of the ledger too. It
// keeps the newest two of a kind.
func (s services) create(ctx context.Context, dir string, step uint64) error {
	made := &snapshotv1.Snapshot{RunId: run, Kind: snapshot.TrainState, Step: step}
	for name, size := range map[string]int{"weights": 9000, "optimizer": 100} {
		content := []byte(strings.Repeat(fmt.Sprint(name, step), size/len(name)))
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, name), content, 0o600)); err != nil {
			return err
		}
		made.Files = append(made.Files, &snapshotv1.SnapshotFile{Path: name, Digest: id.Content(content)})
	}
	slices.SortFunc(made.Files, func(a, b *snapshotv1.SnapshotFile) int { return strings.Compare(a.GetPath(), b.GetPath()) })
	if step == 2 {
		made.Kind = snapshot.Buffer
	}
	_, err := s.CreateSnapshot(ctx, &snapshotv1.CreateSnapshotRequest{Snapshot: made, Directory: dir, Capture: step == 2})
	return err
}

// session opens the services, takes the snapshot of a step, and closes them.
func session(ctx context.Context, base, endpoint string, step uint64) error {
	s, err := open(ctx, base, endpoint)
	if err != nil {
		return err
	}
	return errors.Join(s.create(ctx, filepath.Join(base, scratch, fmt.Sprint("step-", step)), step), s.stop())
}

// A SIGKILL of the process that creates a snapshot, after any of its system calls and at any byte
// of what they write, leaves the snapshot before it whole. What it has stored is deleted at the
// next start, and the creation succeeds when it is repeated.
func TestAKilledCreationLeavesThePreviousSnapshotWhole(t *testing.T) {
	t.Parallel()
	if base := os.Getenv("CRASHTEST_BASE"); base != "" { // the process that is recorded
		if err := session(t.Context(), base, os.Getenv("CRASHTEST_ENDPOINT"), 2); err != nil {
			t.Fatal(err)
		}
		return
	}
	for name, objects := range map[string]bool{"files": false, "objects": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			killed(t, objects)
		})
	}
}

func killed(t *testing.T, objects bool) {
	base, endpoint, log := t.TempDir(), "", &crashtest.Log{}
	var bucket *crashtest.Bucket
	before := map[string][]byte{}
	if objects {
		first := &crashtest.Log{}
		bucket = crashtest.NewBucket(t, nil, first.Add)
		if err := session(t.Context(), base, bucket.URL, 1); err != nil {
			t.Fatal(err)
		}
		for _, op := range first.Ops() {
			before[strings.TrimPrefix(op.Path, crashtest.BucketFolder+"/")] = op.Data
		}
		bucket = crashtest.NewBucket(t, before, log.Add)
		endpoint = bucket.URL
	} else if err := session(t.Context(), base, "", 1); err != nil {
		t.Fatal(err)
	}
	start := read(t, base, before)
	child := exec.Command(os.Args[0], "-test.run=^TestAKilledCreationLeavesThePreviousSnapshotWhole$")
	child.Env = append(os.Environ(), "CRASHTEST_BASE="+base, "CRASHTEST_ENDPOINT="+endpoint)
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	if err := crashtest.Record(child, base, unrecorded, log); err != nil {
		t.Fatal(err)
	}
	var states, distinct, absent, failed int
	memory, err := os.MkdirTemp("/dev/shm", "crashtest-") // without a disk that waits
	if err != nil {
		memory = t.TempDir()
	}
	defer func() { _ = os.RemoveAll(memory) }()
	folder := filepath.Join(memory, "state")
	checked := map[[32]byte]bool{}
	end := crashtest.States(start, log.Ops(), func(s crashtest.State) bool {
		states++
		if key := visible(s.Tree); !checked[key] && (!objects || s.Bytes == 0) { // databases are the same for both
			checked[key] = true
			distinct++
			found, err := check(t, s.Tree, folder, objects, s.Bytes == 0)
			if err != nil {
				t.Errorf("after %s: %v", s, err)
				failed++
			}
			if found == 1 {
				absent++
			}
		}
		return failed < 5
	})
	if failed > 0 {
		return
	}
	var last map[string][]byte
	if objects {
		last = end.Files(crashtest.BucketFolder)
	}
	if diff := end.Equal(read(t, base, last)); diff != "" {
		t.Errorf("the recorded operations do not make the folder: %s", diff)
	}
	t.Logf("%d operations, %d states, %d of them different for the services; in %d of these the snapshot did not exist yet", len(log.Ops()), states, distinct, absent)
	if absent == 0 || absent == distinct {
		t.Error("the recording has no creation")
	}
}

// unrecorded files are the shared memory of SQLite, which the first process that opens a database
// after a kill makes again.
func unrecorded(path string) bool { return strings.HasSuffix(path, "-shm") }

// read returns a folder, with the objects of its bucket.
func read(t *testing.T, base string, objects map[string][]byte) *crashtest.Tree {
	t.Helper()
	for key, data := range objects {
		file := filepath.Join(base, crashtest.BucketFolder, key)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, data, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	tree, err := crashtest.Read(base, unrecorded)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// visible is the same for two states that the services can't tell apart.
func visible(tree *crashtest.Tree) (key [32]byte) {
	hash := sha256.New()
	all := tree.Files("")
	for _, path := range slices.Sorted(maps.Keys(all)) {
		if !strings.HasPrefix(path, scratch+"/") {
			fmt.Fprintf(hash, "%q %d\n", path, len(all[path]))
			_, _ = hash.Write(all[path])
		}
	}
	return [32]byte(hash.Sum(nil))
}

// check opens the services on a state, which it writes to a new folder, and returns the number of
// snapshots. again: and repeats the creation.
func check(t *testing.T, tree *crashtest.Tree, base string, objects, again bool) (found int, err error) {
	t.Helper()
	if err := tree.Make(base); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(base)) }()
	endpoint, stored := "", func() ([]string, error) { return filepath.Glob(filepath.Join(base, artifacts, "cas", "*", "*")) }
	if objects {
		bucket := crashtest.NewBucket(t, tree.Files(crashtest.BucketFolder), func(crashtest.Op) {})
		endpoint, stored = bucket.URL, func() ([]string, error) { return bucket.Keys(), nil }
	}
	s, err := open(t.Context(), base, endpoint)
	if err != nil {
		return 0, fmt.Errorf("the services do not start: %w", err)
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	if _, err := s.DeleteRun(t.Context(), &snapshotv1.DeleteRunRequest{RunId: "run-other"}); err != nil { // sweeps, like a start
		return 0, err
	}
	if found, err = s.whole(t.Context(), stored); err != nil || !again {
		return found, err
	}
	if err := s.create(t.Context(), filepath.Join(base, "again"), 2); err != nil {
		return found, fmt.Errorf("repeat the creation: %w", err)
	}
	if n, err := s.whole(t.Context(), stored); err != nil || n != 2 {
		return found, fmt.Errorf("%d snapshots after the repeated creation: %w", n, err)
	}
	return found, nil
}

// whole verifies every snapshot, that of step 1 among them, and that nothing else is stored.
func (s services) whole(ctx context.Context, stored func() ([]string, error)) (int, error) {
	list, err := s.ListSnapshots(ctx, &snapshotv1.ListSnapshotsRequest{RunId: run})
	if err != nil {
		return 0, err
	}
	named, steps := map[string]bool{}, map[uint64]bool{}
	for _, snap := range list.GetSnapshots() {
		steps[snap.GetStep()] = true
		for _, f := range snap.GetFiles() {
			named[f.GetDigest()] = true
		}
		got, err := s.VerifySnapshot(ctx, &snapshotv1.VerifySnapshotRequest{SnapshotId: snap.GetSnapshotId()})
		if err != nil || len(got.GetFlaws()) > 0 {
			return 0, fmt.Errorf("the snapshot of step %d is damaged: %v, %w", snap.GetStep(), got.GetFlaws(), err)
		}
	}
	if !steps[1] {
		return 0, errors.New("the snapshot of step 1 is missing")
	}
	keys, err := stored()
	for _, key := range keys {
		if !named[path.Base(key)] {
			return 0, fmt.Errorf("%s is stored, and no snapshot names it", key)
		}
	}
	return len(steps), err
}
