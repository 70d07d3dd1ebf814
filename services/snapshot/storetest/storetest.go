// Package storetest is the suite that every snapshot.Store passes.
package storetest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/snapshot"
)

// Run runs the suite. open returns an empty store that is closed with the test.
func Run(t *testing.T, open func(t *testing.T) snapshot.Store) {
	for name, test := range map[string]func(*testing.T, snapshot.Store){
		"record keeps the first": recordKeepsTheFirst,
		"names are keys":         namesAreKeys,
		"get by prefix":          getByPrefix,
		"list":                   list,
		"candidates":             candidates,
		"pin":                    pin,
		"a deleted run":          deletedRun,
		"update":                 update,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

// Snap makes a manifest of a run at a step, with one file per content.
func Snap(id, run string, step uint64, contents ...string) *snapshot.Snapshot {
	s := &snapshot.Snapshot{SnapshotId: id, RunId: run, Kind: snapshot.TrainState, Step: step}
	for i, c := range contents {
		s.Files = append(s.Files, &snapshotv1.SnapshotFile{Path: fmt.Sprint("f", i), Digest: Digest(c)})
	}
	return s
}

// Digest makes a content id of one letter.
func Digest(letter string) string { return "blake3-" + strings.Repeat(letter, 64) }

func record(t *testing.T, s snapshot.Store, snap *snapshot.Snapshot) *snapshot.Snapshot {
	t.Helper()
	got, err := s.Record(t.Context(), snap, nil)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func recordKeepsTheFirst(t *testing.T, s snapshot.Store) {
	first := record(t, s, Snap("snap-1", "run-a", 5, "a"))
	second := record(t, s, Snap("snap-2", "run-a", 5, "b"))
	if !proto.Equal(first, second) {
		t.Fatalf("the second manifest of the key replaced the first: %v", second)
	}
	got, err := s.Find(t.Context(), snapshot.Key{Run: "run-a", Kind: snapshot.TrainState, Step: 5})
	if err != nil || !proto.Equal(got, first) {
		t.Fatalf("found %v, %v", got, err)
	}
	if _, err := s.Find(t.Context(), snapshot.Key{Run: "run-a", Kind: snapshot.TrainState, Step: 6}); !errors.Is(err, snapshot.ErrNotFound) {
		t.Fatalf("step 6: %v", err)
	}
	if _, err := s.Get(t.Context(), "snap-2"); !errors.Is(err, snapshot.ErrNotFound) {
		t.Fatalf("the second manifest was stored: %v", err)
	}
}

func namesAreKeys(t *testing.T, s snapshot.Store) {
	unnamed := record(t, s, Snap("snap-1", "run-a", 5, "a"))
	named := Snap("snap-2", "run-a", 5, "b")
	named.Name = "best"
	if got := record(t, s, named); !proto.Equal(got, named) {
		t.Fatalf("a manifest with another name was not stored: %v", got)
	}
	for _, want := range []*snapshot.Snapshot{unnamed, named} {
		if got, err := s.Find(t.Context(), snapshot.KeyOf(want)); err != nil || !proto.Equal(got, want) {
			t.Errorf("found %v, %v, want %v", got, err, want)
		}
	}
	again := Snap("snap-3", "run-a", 5, "c")
	again.Name = "best"
	if got := record(t, s, again); !proto.Equal(got, named) {
		t.Errorf("the second manifest of a named key replaced the first: %v", got)
	}
	if err := s.Delete(t.Context(), nil, "snap-2"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Find(t.Context(), snapshot.KeyOf(unnamed)); err != nil {
		t.Errorf("deleting one name deleted the other: %v", err)
	}
}

func getByPrefix(t *testing.T, s snapshot.Store) {
	record(t, s, Snap("snap-ab", "run-a", 1, "a"))
	record(t, s, Snap("snap-ac", "run-a", 2, "a"))
	for ref, want := range map[string]error{"snap-ab": nil, "snap-a": snapshot.ErrAmbiguous, "snap-b": snapshot.ErrNotFound} {
		if _, err := s.Get(t.Context(), ref); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", ref, err, want)
		}
	}
}

func ids(list []*snapshot.Snapshot) (out []string) {
	for _, s := range list {
		out = append(out, s.GetSnapshotId())
	}
	return out
}

func list(t *testing.T, s snapshot.Store) {
	record(t, s, Snap("snap-1", "run-a", 1, "a"))
	record(t, s, Snap("snap-2", "run-b", 1, "a"))
	record(t, s, Snap("snap-3", "run-a", 2, "a"))
	other := Snap("snap-4", "run-a", 2, "a")
	other.Kind = snapshotv1.SnapshotKind_SNAPSHOT_KIND_BUFFER
	record(t, s, other)
	for name, c := range map[string]struct {
		filter snapshot.Filter
		want   []string
	}{
		"all, newest first": {snapshot.Filter{}, []string{"snap-4", "snap-3", "snap-2", "snap-1"}},
		"of a run and kind": {snapshot.Filter{Run: "run-a", Kind: snapshot.TrainState}, []string{"snap-3", "snap-1"}},
		"a page":            {snapshot.Filter{After: "snap-4", Limit: 2}, []string{"snap-3", "snap-2"}},
		"of an unknown run": {snapshot.Filter{Run: "run-x"}, nil},
	} {
		got, err := s.List(t.Context(), c.filter)
		if err != nil || !slices.Equal(ids(got), c.want) {
			t.Errorf("%s: %v, %v, want %v", name, ids(got), err, c.want)
		}
	}
}

// A file becomes garbage when the last manifest that names it is deleted, or when it was noted and
// no manifest followed; the id of a snapshot when its manifest is deleted or did not follow.
func candidates(t *testing.T, s snapshot.Store) {
	record(t, s, Snap("snap-1", "run-a", 1, "a", "b"))
	record(t, s, Snap("snap-2", "run-a", 2, "b", "c"))
	if err := s.Note(t.Context(), []string{Digest("c"), Digest("d"), Digest("d"), "snap-2"}); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(t.Context(), nil, "snap-1", "snap-unknown"); err != nil {
		t.Fatal(err)
	}
	garbage, named, err := s.Garbage(t.Context())
	if err != nil || !slices.Equal(garbage, []string{Digest("a"), Digest("d"), "snap-1"}) || !slices.Equal(named, []string{Digest("b"), Digest("c"), "snap-2"}) {
		t.Fatalf("garbage %v, named %v, %v", garbage, named, err)
	}
	if err := s.Forget(t.Context(), append(garbage, named...)); err != nil {
		t.Fatal(err)
	}
	if garbage, named, err = s.Garbage(t.Context()); err != nil || len(garbage)+len(named) != 0 {
		t.Fatalf("after forgetting: %v, %v, %v", garbage, named, err)
	}
	if err := s.Delete(t.Context(), nil, "snap-2"); err != nil {
		t.Fatal(err)
	}
	if garbage, _, _ = s.Garbage(t.Context()); !slices.Equal(garbage, []string{Digest("b"), Digest("c"), "snap-2"}) {
		t.Fatalf("garbage of the last manifest: %v", garbage)
	}
}

func pin(t *testing.T, s snapshot.Store) {
	record(t, s, Snap("snap-1", "run-a", 1, "a"))
	record(t, s, Snap("snap-2", "run-a", 2, "a"))
	if err := s.Pin(t.Context(), "snap-1", nil); err != nil {
		t.Fatal(err)
	}
	got, err := s.List(t.Context(), snapshot.Filter{Unpinned: true})
	if err != nil || !slices.Equal(ids(got), []string{"snap-2"}) {
		t.Fatalf("unpinned: %v, %v", ids(got), err)
	}
	if got, err := s.List(t.Context(), snapshot.Filter{Pinned: true}); err != nil || !slices.Equal(ids(got), []string{"snap-1"}) {
		t.Fatalf("pinned: %v, %v", ids(got), err)
	}
	if err := s.Pin(t.Context(), "snap-9", nil); !errors.Is(err, snapshot.ErrNotFound) {
		t.Fatalf("an unknown one was pinned: %v", err)
	}
	if err := s.Delete(t.Context(), nil, "snap-2", "snap-1"); !errors.Is(err, snapshot.ErrInUse) {
		t.Fatalf("a pinned one was deleted: %v", err)
	}
	if got, err := s.List(t.Context(), snapshot.Filter{}); err != nil || len(got) != 2 {
		t.Fatalf("after a refused deletion: %v, %v", ids(got), err)
	}
	if err := errors.Join(s.Unpin(t.Context(), "snap-1", nil), s.Delete(t.Context(), nil, "snap-1")); err != nil {
		t.Fatal(err)
	}
	if err := s.Unpin(t.Context(), "snap-9", nil); !errors.Is(err, snapshot.ErrNotFound) {
		t.Fatalf("an unknown one was unpinned: %v", err)
	}
}

// What a worker or a leader sends for a deleted run is refused, and an imported snapshot of it is
// not.
func deletedRun(t *testing.T, s snapshot.Store) {
	by := fencetest.Controller(1, 1)
	episode := func(index uint64) []*snapshot.Episode {
		return []*snapshot.Episode{{Key: &trajectoryv1.TrajectoryKey{RunId: "run-a", Index: index}, Turns: 1}}
	}
	if err := errors.Join(s.SaveEpisodes(t.Context(), "run-a", episode(1), nil), s.DropRun(t.Context(), "run-a", fencetest.Scheduler(1, 1))); err != nil {
		t.Fatal(err)
	}
	_, late := s.Record(t.Context(), Snap("snap-1", "run-a", 1, "a"), by)
	for what, err := range map[string]error{
		"a worker saves":  s.SaveEpisodes(t.Context(), "run-a", episode(2), nil),
		"a leader adopts": s.SaveEpisodes(t.Context(), "run-a", episode(3), by),
		"a leader asks":   s.Admit(t.Context(), "run-a", by),
		"a leader stores": late,
	} {
		if !errors.Is(err, fence.ErrDeleted) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := s.DropEpisodes(t.Context(), "run-a", []*snapshotv1.EpisodeGroup{{Index: 1}}); err != nil {
		t.Errorf("a worker drops: %v", err)
	}
	if got, err := s.Episodes(t.Context(), "run-a", snapshot.EpisodePlace{Sample: -1}, 10); err != nil || len(got) > 0 {
		t.Errorf("episodes %v, %v", got, err)
	}
	if err := s.DropRun(t.Context(), "run-a", fencetest.Scheduler(1, 1)); err != nil {
		t.Errorf("deleted again: %v", err)
	}
	imported := Snap("snap-2", "run-a", 1, "a")
	if got := record(t, s, imported); !proto.Equal(got, imported) {
		t.Errorf("imported %v", got)
	}
}

func update(t *testing.T, s snapshot.Store) {
	moved := proto.CloneOf(record(t, s, Snap("snap-1", "run-a", 1, "a")))
	other := record(t, s, Snap("snap-2", "run-a", 2, "a"))
	moved.Origin = &snapshotv1.Origin{BaseDir: "/elsewhere"}
	if err := s.Update(t.Context(), moved); err != nil {
		t.Fatal(err)
	}
	for _, want := range []*snapshot.Snapshot{moved, other} {
		if got, err := s.Get(t.Context(), want.GetSnapshotId()); err != nil || !proto.Equal(got, want) {
			t.Errorf("%v, %v, want %v", got, err, want)
		}
	}
	if err := s.Update(t.Context(), Snap("snap-9", "run-a", 9, "a")); !errors.Is(err, snapshot.ErrNotFound) {
		t.Errorf("an unknown one was updated: %v", err)
	}
}
