package sqldb_test

import (
	"embed"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/rollout-rl/rollout/database/buffer"
	"github.com/rollout-rl/rollout/database/controller"
	"github.com/rollout-rl/rollout/database/gateway"
	"github.com/rollout-rl/rollout/database/scheduler"
	"github.com/rollout-rl/rollout/database/snapshot"
	"github.com/rollout-rl/rollout/database/storage"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
)

// Each service's database comes forward from each version that was ever released, and in both
// dialects there are the same versions.
func TestEveryServiceComesForward(t *testing.T) {
	t.Parallel()
	sqldbtest.Run(t, func(t *testing.T, place func(*testing.T) sqldb.Place) {
		for service, migrations := range map[string]embed.FS{
			"buffer": buffer.Migrations, "controller": controller.Migrations, "gateway": gateway.Migrations,
			"scheduler": scheduler.Migrations, "snapshot": snapshot.Migrations, "storage": storage.Migrations,
		} {
			t.Run(service, func(t *testing.T) {
				t.Parallel()
				names := files(t, migrations, "sqlite")
				if other := files(t, migrations, "postgres"); !slices.Equal(names, other) {
					t.Fatalf("versions differ: %v and %v", names, other)
				}
				for i := range names {
					p := place(t)
					for _, known := range []int{i + 1, len(names), len(names)} { // old, new, and new once more
						db := sqldbtest.Open(t, p, service)
						if err := db.Migrate(t.Context(), upTo(t, migrations, names[:known])); err != nil {
							t.Errorf("from %s to %s: %v", names[i], names[known-1], err)
						}
					}
				}
			})
		}
	})
}

func files(t *testing.T, fsys fs.FS, dialect string) (names []string) {
	t.Helper()
	entries, err := fs.ReadDir(fsys, dialect)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".sql") {
			names = append(names, e.Name())
		}
	}
	return names
}

// upTo returns the migrations that an older program has.
func upTo(t *testing.T, fsys fs.FS, names []string) fstest.MapFS {
	t.Helper()
	old := fstest.MapFS{}
	for _, dialect := range []string{"sqlite", "postgres"} {
		for _, name := range names {
			data, err := fs.ReadFile(fsys, dialect+"/"+name)
			if err != nil {
				t.Fatal(err)
			}
			old[dialect+"/"+name] = &fstest.MapFile{Data: data}
		}
	}
	return old
}
