package controller

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
)

// Two leaders never share a folder, and a former one removes nothing of its successor.
func TestFoldersOfLeadersAreSeparate(t *testing.T) {
	t.Parallel()
	run := t.TempDir()
	leader := func(incarnation uint32, epoch uint64) scratch {
		return newScratch(run, &fencev1.Fence{Incarnation: incarnation, LeaderEpoch: epoch})
	}
	if err := leader(1, 1).sweep(); err != nil {
		t.Errorf("without a folder: %v", err)
	}
	former, middle, newest := leader(1, 9), leader(2, 9), leader(2, 10)
	dirs := []string{former.dir("step-000004"), middle.dir("step-000004"), newest.dir("step-000004"), newest.dir("load-snap"), filepath.Join(run, "state", "step-000003")}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "state.bin"), []byte(dir), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	left := func() (names []string) {
		entries, err := os.ReadDir(filepath.Join(run, "state"))
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range entries {
			names = append(names, entry.Name())
		}
		return names
	}
	for _, c := range []struct {
		by   scratch
		want []string
	}{
		{former, []string{"load-snap-i2-e10", "step-000004-i1-e9", "step-000004-i2-e10", "step-000004-i2-e9"}},
		{middle, []string{"load-snap-i2-e10", "step-000004-i2-e10", "step-000004-i2-e9"}},
		{newest, []string{"load-snap-i2-e10", "step-000004-i2-e10"}},
		{former, []string{"load-snap-i2-e10", "step-000004-i2-e10"}},
	} {
		if err := c.by.sweep(); err != nil || !slices.Equal(left(), c.want) {
			t.Errorf("incarnation %d, epoch %d: %v, %v; want %v", c.by.incarnation, c.by.epoch, left(), err, c.want)
		}
	}
}
