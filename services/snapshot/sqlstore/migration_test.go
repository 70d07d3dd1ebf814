package sqlstore_test

import (
	"errors"
	"io/fs"
	"slices"
	"testing"
	"testing/fstest"

	"google.golang.org/protobuf/proto"

	schema "github.com/rollout-rl/rollout/database/snapshot"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	"github.com/rollout-rl/rollout/services/snapshot"
	"github.com/rollout-rl/rollout/services/snapshot/sqlstore"
	"github.com/rollout-rl/rollout/services/snapshot/storetest"
)

// Manifests, their files, and pins survive the migration that adds names to the key.
func TestTheNameMigrationKeepsManifests(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		p := place(t)
		db, err := sqldb.Ready(t.Context(), p, "snapshot", sqldb.Full, unnamed(t))
		if err != nil {
			t.Fatal(err)
		}
		want := storetest.Snap("snap-1", "run-a", 5, "a", "b")
		manifest, err := proto.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := db.Exec(t.Context(), `INSERT INTO snapshot (snapshot_id, run_id, kind, step, manifest, pinned) VALUES ($1, $2, $3, $4, $5, TRUE)`,
			"snap-1", "run-a", int32(snapshot.TrainState), 5, manifest); err != nil {
			t.Fatal(err)
		}
		for _, f := range want.GetFiles() {
			if _, err := db.Exec(t.Context(), `INSERT INTO snapshot_file (snapshot_id, digest) VALUES ($1, $2)`, "snap-1", f.GetDigest()); err != nil {
				t.Fatal(err)
			}
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}

		store := sqldbtest.Store(t, p, sqlstore.Open)
		if got, err := store.Find(t.Context(), snapshot.KeyOf(want)); err != nil || !proto.Equal(got, want) {
			t.Fatalf("found %v, %v", got, err)
		}
		if unpinned, err := store.List(t.Context(), snapshot.Filter{Unpinned: true}); err != nil || len(unpinned) != 0 {
			t.Errorf("unpinned: %v, %v", unpinned, err)
		}
		if err := errors.Join(store.Unpin(t.Context(), "snap-1", nil), store.Delete(t.Context(), nil, "snap-1")); err != nil {
			t.Fatal(err)
		}
		garbage, _, err := store.Garbage(t.Context())
		if err != nil || !slices.Equal(garbage, []string{storetest.Digest("a"), storetest.Digest("b"), "snap-1"}) {
			t.Errorf("files of the deleted manifest: %v, %v", garbage, err)
		}
	})
}

// unnamed returns the migrations before the one that adds names.
func unnamed(t *testing.T) fs.FS {
	before := fstest.MapFS{}
	err := fs.WalkDir(schema.Migrations, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || entry.Name() >= "00003_name.sql" {
			return err
		}
		data, err := fs.ReadFile(schema.Migrations, path)
		before[path] = &fstest.MapFile{Data: data}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return before
}
