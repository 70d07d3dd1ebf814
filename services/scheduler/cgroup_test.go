package scheduler

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// A worker that a limit on CPU time stops in most periods is named with the limit, on both versions
// of cgroups, and also if the limit is of a group above its own.
func TestAThrottledWorkerIsNamed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		group  string // a line of /proc/PID/cgroup
		files  map[string]string
		stat   string // where its file is
		before string
		after  string
		words  []string // nil: it is not throttled
	}{
		"version 1": {
			"4:cpu,cpuacct:/job/a", map[string]string{"cpu,cpuacct/job/a/cpu.cfs_quota_us": "2000", "cpu,cpuacct/job/a/cpu.cfs_period_us": "1000000"},
			"cpu,cpuacct/job/a", "nr_periods 40\nnr_throttled 39\nthrottled_time 38000000000\n", "nr_periods 41\nnr_throttled 40\nthrottled_time 39000000000\n",
			[]string{"inference-0 (7)", "throttled", "0.2 % of a CPU", "cpu,cpuacct/job/a", "40 of 41 periods", "39 s"},
		},
		"version 1, mounted by the name of one controller": {
			"4:cpu,cpuacct:/job", map[string]string{"cpu/job/cpu.cfs_quota_us": "5000", "cpu/job/cpu.cfs_period_us": "100000"},
			"cpu/job", "nr_periods 40\nnr_throttled 39\n", "nr_periods 50\nnr_throttled 49\n", []string{"5 % of a CPU", "cpu/job"},
		},
		"version 2, above": {
			"0::/pod/container", map[string]string{"pod/cpu.max": "20000 100000\n", "pod/container/cpu.max": "max 100000\n"},
			"pod", "nr_periods 40\nnr_throttled 39\nthrottled_usec 3000000\n", "nr_periods 42\nnr_throttled 40\nthrottled_usec 4000000\n", []string{"20 % of a CPU", "cpu.max", "for 4 s"},
		},
		"it was throttled once": {
			"0::/pod", map[string]string{"pod/cpu.max": "20000 100000\n"}, "pod", "nr_periods 40\nnr_throttled 39\n", "nr_periods 44\nnr_throttled 39\n", nil,
		},
		"it is throttled seldom": {
			"0::/pod", map[string]string{"pod/cpu.max": "20000 100000\n"}, "pod", "nr_periods 40\nnr_throttled 9\n", "nr_periods 50\nnr_throttled 11\n", nil,
		},
		"no limit": {"0::/pod", map[string]string{"pod/cpu.max": "max 100000\n"}, "pod", "nr_periods 0\nnr_throttled 0\n", "nr_periods 0\nnr_throttled 0\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tree := cgroupTree{root: t.TempDir(), proc: t.TempDir()}
			put := func(file, text string) {
				if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			put(filepath.Join(tree.proc, "7", "cgroup"), "1:name=systemd:/\n"+c.group+"\n")
			for file, text := range c.files {
				put(filepath.Join(tree.root, file), text)
			}
			stat := filepath.Join(tree.root, c.stat, "cpu.stat")
			put(stat, c.before)
			synctest.Test(t, func(t *testing.T) {
				time.AfterFunc(time.Millisecond, func() { put(stat, c.after) })
				found := tree.throttled(t.Context(), &runv1.Worker{WorkerId: "inference-0", Pid: 7})
				if (found != nil) != (c.words != nil) {
					t.Fatalf("got %v", found)
				}
				for _, word := range c.words {
					if !strings.Contains(found.GetEvidence(), word) {
						t.Errorf("%q does not have %q", found.GetEvidence(), word)
					}
				}
				if found != nil && !strings.Contains(found.GetFix(), "raise the quota") {
					t.Errorf("the fix is %q", found.GetFix())
				}
			})
		})
	}
}
