package snapshot_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/files"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	"github.com/rollout-rl/rollout/services/snapshot"
	"github.com/rollout-rl/rollout/services/snapshot/storetest"
)

// bucket checks that a manifest is in it only while the files that it names are stored.
type bucket struct {
	blob.Store
	t     *testing.T
	world *world
	down  bool
}

func newBucket(t *testing.T) *bucket {
	t.Helper()
	store, err := files.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return &bucket{Store: store, t: t}
}

func (b *bucket) Put(ctx context.Context, key string, r io.Reader) (blob.Info, error) {
	if b.down {
		return blob.Info{}, status.Error(codes.Unavailable, "the bucket is down")
	}
	text, err := io.ReadAll(r)
	if err != nil {
		return blob.Info{}, err
	}
	b.check("written before", string(text))
	return b.Store.Put(ctx, key, strings.NewReader(string(text)))
}

func (b *bucket) Delete(ctx context.Context, key string) error {
	if r, err := b.Get(ctx, key, blob.Range{}); err == nil {
		text, err := io.ReadAll(r)
		if err = errors.Join(err, r.Close()); err != nil {
			return err
		}
		b.check("deleted after", string(text))
	}
	return b.Store.Delete(ctx, key)
}

func (b *bucket) check(when, manifest string) {
	stored := b.world.artifacts.list()
	for _, letter := range []string{"a", "b", "c", "d"} {
		if strings.Contains(manifest, storetest.Digest(letter)) && !slices.Contains(stored, letter) {
			b.t.Errorf("a manifest is %s its file %s", when, letter)
		}
	}
}

func (b *bucket) list() (keys []string) {
	b.t.Helper()
	for object, err := range b.List(b.t.Context(), "") {
		if err != nil {
			b.t.Fatal(err)
		}
		keys = append(keys, object.Key)
	}
	return keys
}

func (w *world) recover(t *testing.T, request *snapshotv1.RecoverSnapshotsRequest) (all []*snapshotv1.RecoveredSnapshot) {
	t.Helper()
	for {
		page, err := w.RecoverSnapshots(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, page.GetSnapshots()...)
		if request.PageToken = page.GetNextPageToken(); request.GetPageToken() == "" {
			return all
		}
	}
}

func TestTheBucketHasTheManifestsOfItsArtifacts(t *testing.T) {
	t.Parallel()
	b := newBucket(t)
	w := setup(t, b)
	b.world = w
	w.take(t, 1, 2, "a")
	second, third := w.take(t, 2, 2, "a", "b"), w.take(t, 3, 2, "c")
	want := []string{"snapshots/" + second.GetSnapshotId() + ".json", "snapshots/" + third.GetSnapshotId() + ".json"}
	if got := b.list(); !slices.Equal(got, want) {
		t.Fatalf("after retention the bucket has %v, want %v", got, want)
	}
	b.down = true
	lost := storetest.Snap("", "run-a", 4, "d")
	if _, err := w.CreateSnapshot(t.Context(), &snapshotv1.CreateSnapshotRequest{Snapshot: lost, Directory: "/scratch"}); err == nil {
		t.Fatal("a snapshot was created without its manifest in the bucket")
	}
	if _, err := w.store.Find(t.Context(), snapshot.KeyOf(lost)); !errors.Is(err, snapshot.ErrNotFound) {
		t.Fatalf("it was recorded: %v", err)
	}
	for _, made := range []*snapshot.Snapshot{second, third} {
		if _, err := w.DeleteSnapshot(t.Context(), &snapshotv1.DeleteSnapshotRequest{SnapshotId: made.GetSnapshotId()}); err != nil {
			t.Fatal(err)
		}
	}
	if got := append(b.list(), w.artifacts.list()...); len(got) > 0 {
		t.Fatalf("after the deletion of every snapshot there are %v", got)
	}
}

func TestALostControlPlaneIsRecoveredFromTheBucket(t *testing.T) {
	t.Parallel()
	b := newBucket(t)
	old := setup(t, b)
	b.world = old
	var made []string
	for step, content := range []string{"a", "b", "c"} {
		made = append(made, old.take(t, uint64(step+1), 0, content).GetSnapshotId())
	}
	delete(old.artifacts.stored, storetest.Digest("b"))
	w := setup(t, b)
	b.world = w
	w.artifacts.stored = old.artifacts.stored

	found := w.recover(t, &snapshotv1.RecoverSnapshotsRequest{PageSize: 2})
	var ids []string
	for _, one := range found {
		ids = append(ids, one.GetSnapshot().GetSnapshotId())
	}
	if !slices.Equal(ids, made) {
		t.Fatalf("found %v, want %v", ids, made)
	}
	if got := found[1].GetProblem(); got != "its file f0 is not in the bucket" || found[0].GetProblem()+found[2].GetProblem() != "" {
		t.Errorf("problems: %v", found)
	}
	if _, err := w.RestoreSnapshot(t.Context(), &snapshotv1.RestoreSnapshotRequest{SnapshotId: made[2]}); err != nil {
		t.Fatal(err)
	}
	if got := w.scheduler.created; got.GetFromSnapshot() != made[2] || got.GetBaseDir() != "/data" || string(got.GetLock()) != `{"config":{"name":"origin"},"format":2}` {
		t.Errorf("restored %v", got)
	}
	again := w.recover(t, &snapshotv1.RecoverSnapshotsRequest{RunId: "run-a", BaseDir: "/moved"})
	if !again[0].GetKnown() || again[1].GetKnown() || !again[2].GetKnown() {
		t.Errorf("again: %v", again)
	}
	if got, err := w.store.Get(t.Context(), made[0]); err != nil || got.GetOrigin().GetBaseDir() != "/moved" {
		t.Errorf("the folder of its inputs: %v, %v", got, err)
	}
	if got := w.recover(t, &snapshotv1.RecoverSnapshotsRequest{RunId: "run-b"}); len(got) > 0 {
		t.Errorf("of another run: %v", got)
	}
	if got := w.artifacts.list(); !slices.Equal(got, []string{"a", "c"}) {
		t.Errorf("storage has %v", got)
	}
}

func TestARecoveryNeedsABucketThatCanBeRead(t *testing.T) {
	t.Parallel()
	if _, err := setup(t).RecoverSnapshots(t.Context(), &snapshotv1.RecoverSnapshotsRequest{}); !errors.Is(err, snapshot.ErrNoBucket) {
		t.Errorf("without a bucket: %v", err)
	}
	b := newBucket(t)
	w := setup(t, b)
	b.world = w
	if _, err := w.RecoverSnapshots(t.Context(), &snapshotv1.RecoverSnapshotsRequest{BaseDir: "here"}); !errors.Is(err, snapshot.ErrInvalid) {
		t.Errorf("with a relative folder: %v", err)
	}
	made := w.take(t, 1, 0, "a").GetSnapshotId()
	for name, text := range map[string]string{"half": `{"snapshot_id"`, "of another": `{"snapshot_id": "snap-x"}`, "without a plan": `{"snapshot_id": "` + made + `"}`} {
		key := "snapshots/" + made + ".json"
		if err := b.Store.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Store.Put(t.Context(), key, strings.NewReader(text)); err != nil {
			t.Fatal(err)
		}
		if _, err := w.RecoverSnapshots(t.Context(), &snapshotv1.RecoverSnapshotsRequest{}); !errors.Is(err, snapshot.ErrInvalid) || !strings.Contains(err.Error(), key) {
			t.Errorf("a manifest that is %s: %v", name, err)
		}
	}
}
