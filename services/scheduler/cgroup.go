package scheduler

import (
	"context"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/libs/wait"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

const (
	// longestPeriod bounds how long the counters of a cgroup are watched.
	longestPeriod = 1500 * time.Millisecond
	// starved: a group whose processes the kernel stops in this part of all periods lacks CPU.
	starved = 0.5
)

// cpuQuota is a limit of a cgroup on CPU time, with the counters of the kernel.
type cpuQuota struct {
	folder    string
	file      string // of the limit
	cpus      float64
	period    time.Duration
	periods   uint64 // in which a process of it was ready to run
	throttled uint64 // of them, those in which it was stopped
	stopped   time.Duration
}

// cgroupTree is the tree of cgroups of this host, as this process sees it.
type cgroupTree struct{ root, proc string }

// quotas are the limits on the CPU time of a process, of its group and of those above it.
func (c cgroupTree) quotas(pid int) (out []cpuQuota) {
	text, _ := os.ReadFile(path.Join(c.proc, strconv.Itoa(pid), "cgroup"))
	for line := range strings.Lines(string(text)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		read, roots := quotaV1, []string{fields[1], "cpu"}
		switch {
		case fields[0] == "0" && fields[1] == "":
			read, roots = quotaV2, []string{"", "unified"}
		case !strings.Contains(","+fields[1]+",", ",cpu,"):
			continue
		}
		for _, root := range roots {
			if found := above(path.Join(c.root, root), fields[2], read); len(found) > 0 {
				out = append(out, found...)
				break
			}
		}
	}
	return out
}

// above reads the limits of a group and of those above it.
func above(root, group string, read func(folder string) (cpuQuota, bool)) (out []cpuQuota) {
	for at := path.Clean("/" + group); ; at = path.Dir(at) {
		if q, limited := read(path.Join(root, at)); limited {
			out = append(out, q)
		}
		if at == "/" {
			return out
		}
	}
}

// quotaV1 reads cpu.cfs_quota_us.
func quotaV1(folder string) (cpuQuota, bool) {
	quota, period := number(folder, "cpu.cfs_quota_us"), number(folder, "cpu.cfs_period_us")
	stat := counters(folder)
	q := cpuQuota{
		folder: folder, file: "cpu.cfs_quota_us", cpus: quota / period, period: time.Duration(period) * time.Microsecond,
		periods: stat["nr_periods"], throttled: stat["nr_throttled"], stopped: time.Duration(stat["throttled_time"]),
	}
	return q, quota > 0 && period > 0
}

// quotaV2 reads cpu.max.
func quotaV2(folder string) (cpuQuota, bool) {
	text, _ := os.ReadFile(path.Join(folder, "cpu.max"))
	var quota, period float64
	if n, err := fmt.Sscan(string(text), &quota, &period); n != 2 || err != nil || period <= 0 { // "max" is no limit
		return cpuQuota{}, false
	}
	stat := counters(folder)
	return cpuQuota{
		folder: folder, file: "cpu.max", cpus: quota / period, period: time.Duration(period) * time.Microsecond,
		periods: stat["nr_periods"], throttled: stat["nr_throttled"], stopped: time.Duration(stat["throttled_usec"]) * time.Microsecond,
	}, true
}

func number(folder, file string) float64 {
	text, _ := os.ReadFile(path.Join(folder, file))
	n, _ := strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
	return n
}

// counters reads cpu.stat.
func counters(folder string) map[string]uint64 {
	out := map[string]uint64{}
	text, _ := os.ReadFile(path.Join(folder, "cpu.stat"))
	for line := range strings.Lines(string(text)) {
		if name, value, found := strings.Cut(strings.TrimSpace(line), " "); found {
			out[name], _ = strconv.ParseUint(value, 10, 64)
		}
	}
	return out
}

// throttled is the wait of a worker that a limit on CPU time stops most of the time; nil if none
// does. It watches the counters for a period, if there is a limit that has stopped the worker.
func (c cgroupTree) throttled(ctx context.Context, w *runv1.Worker) *waitv1.Wait {
	first := c.quotas(int(w.GetPid()))
	pause := time.Duration(0)
	for _, q := range first {
		if q.throttled > 0 {
			pause = max(pause, min(q.period*5/4, longestPeriod))
		}
	}
	if w.GetPid() == 0 || pause == 0 {
		return nil
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return nil
	case <-timer.C:
	}
	for i, now := range c.quotas(int(w.GetPid())) {
		if i >= len(first) || now.folder != first[i].folder {
			return nil // it was moved
		}
		before := first[i]
		if stops := now.throttled - before.throttled; stops == 0 || float64(stops) < starved*float64(now.periods-before.periods) {
			continue
		}
		return &waitv1.Wait{
			Owner: wait.User, Reason: wait.WorkerThrottled, Subjects: []string{w.GetWorkerId()},
			Evidence: fmt.Sprintf("the process of %s (%d) is throttled: its cgroup %s may use %s of a CPU (%s), and the kernel stopped it in %d of %d periods of %s (nr_throttled), for %.0f s in all",
				w.GetWorkerId(), w.GetPid(), now.folder, share(now.cpus), now.file, now.throttled, now.periods, now.period, now.stopped.Seconds()),
			Fix: fmt.Sprintf("raise the quota: %s, or the CPU limit of the container that this cgroup is of (`docker update --cpus`, resources.limits.cpu)", path.Join(now.folder, now.file)),
		}
	}
	return nil
}

// share is a number of CPUs for people.
func share(cpus float64) string {
	return strconv.FormatFloat(cpus*100, 'g', 3, 64) + " %"
}
