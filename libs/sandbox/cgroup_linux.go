package sandbox

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// controller is where and how one limit becomes a cgroup.
type controller struct {
	version int    // 1, 2; 0: no cgroup
	parent  string // folder in which boxes get theirs
	why     string // why version is 0
}

// cgroups creates the control groups of boxes, a folder per hierarchy that enforces something.
type cgroups struct {
	memory, pids, cpu controller
}

// hierarchies is what findCgroups knows of this host.
type hierarchies struct {
	own map[string]string                   // see ownCgroups
	try func(parent, file string) error     // tryGroup
	has func(mount, controller string) bool // whether cgroup v2 has the controller
}

// findCgroups tries to create a group in each hierarchy, and keeps where it worked.
func findCgroups() cgroups {
	return hierarchies{own: ownCgroups(), try: tryGroup, has: hasController}.find()
}

func hasController(mount, name string) bool {
	raw, err := os.ReadFile(filepath.Join(mount, "cgroup.controllers"))
	return err == nil && slices.Contains(strings.Fields(string(raw)), name)
}

func (h hierarchies) find() cgroups {
	own := h.own
	find := func(name string, files ...string) controller {
		var why string
		if dir := own[name]; dir != "" {
			err := h.try(dir, files[0])
			if err == nil {
				return controller{version: 1, parent: dir}
			}
			why = "cgroup v1: " + err.Error()
		}
		if mount, dir := own["v2 mount"], own["v2"]; mount != "" {
			if !h.has(mount, name) {
				if why == "" {
					why = "cgroup v2 has no controller " + name
				}
				return controller{why: why}
			}
			// A group with processes can't pass controllers on, so the nearest one that does is used.
			for {
				err := h.try(dir, files[1])
				if err == nil {
					return controller{version: 2, parent: dir}
				}
				if why == "" {
					why = "cgroup v2: " + err.Error()
				}
				if dir == mount || len(dir) <= len(mount) {
					return controller{why: why}
				}
				dir = filepath.Dir(dir)
			}
		}
		if why == "" {
			why = "no cgroup hierarchy with the controller " + name + " is mounted"
		}
		return controller{why: why}
	}
	found := cgroups{
		memory: find("memory", "memory.limit_in_bytes", "memory.max"),
		pids:   find("pids", "pids.max", "pids.max"),
		cpu:    find("cpu", "cpu.cfs_quota_us", "cpu.max"),
	}
	h.share(map[string]*controller{"memory.max": &found.memory, "pids.max": &found.pids, "cpu.max": &found.cpu})
	return found
}

// share gives the controllers of cgroup v2 one parent: a process is in a single group of it, and
// would leave the first one by joining the second. What a group passes on, each group above it
// passes on, too, so the highest parent should have all of them.
func (h hierarchies) share(controllers map[string]*controller) {
	parent := ""
	for _, c := range controllers {
		if c.version == 2 && (parent == "" || len(c.parent) < len(parent)) {
			parent = c.parent
		}
	}
	for file, c := range controllers {
		if c.version != 2 || c.parent == parent {
			continue
		}
		if err := h.try(parent, file); err != nil {
			*c = controller{why: fmt.Sprintf("cgroup v2: %s enforces it, but not %s, where the groups of boxes are: %v", c.parent, parent, err)}
			continue
		}
		c.parent = parent
	}
}

var groupSequence atomic.Int64

func groupName() string {
	return fmt.Sprintf("rollout-sandbox-%d-%d", os.Getpid(), groupSequence.Add(1))
}

// tryGroup creates a group, checks that it has a file to write to, and removes it.
func tryGroup(parent, file string) error {
	dir := filepath.Join(parent, groupName())
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	defer os.Remove(dir)
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

// ownCgroups returns the folder of this process in each hierarchy, by controller, and as "v2".
func ownCgroups() map[string]string {
	mounts := map[string][2]string{} // controller or "v2" -> root, mount point
	lines := func(path string, each func(string)) {
		f, err := os.Open(path)
		if err != nil {
			return
		}
		defer f.Close()
		for s := bufio.NewScanner(f); s.Scan(); {
			each(s.Text())
		}
	}
	lines("/proc/self/mountinfo", func(line string) {
		left, right, _ := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if len(l) < 5 || len(r) < 3 {
			return
		}
		switch r[0] {
		case "cgroup2":
			mounts["v2"] = [2]string{l[3], l[4]}
		case "cgroup":
			for option := range strings.SplitSeq(r[2], ",") {
				mounts[option] = [2]string{l[3], l[4]}
			}
		}
	})
	out := map[string]string{}
	lines("/proc/self/cgroup", func(line string) {
		parts := strings.SplitN(line, ":", 3)
		if len(parts) != 3 {
			return
		}
		names := strings.Split(parts[1], ",")
		if parts[0] == "0" {
			names = []string{"v2"}
		}
		for _, name := range names {
			mount, ok := mounts[name]
			if !ok {
				continue
			}
			path, inside := strings.CutPrefix(parts[2], strings.TrimSuffix(mount[0], "/"))
			if !inside {
				path = "/"
			}
			out[name] = filepath.Join(mount[1], path)
			if name == "v2" {
				out["v2 mount"] = mount[1]
			}
		}
	})
	return out
}

// sweep removes groups of supervisors that are gone.
func (c cgroups) sweep() {
	for _, parent := range c.parents() {
		dirs, _ := filepath.Glob(filepath.Join(parent, "rollout-sandbox-*"))
		for _, dir := range dirs {
			text, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), "rollout-sandbox-"), "-")
			if pid, err := strconv.Atoi(text); err == nil && errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
				(&group{dirs: []string{dir}}).remove()
			}
		}
	}
}

func (c cgroups) parents() []string {
	var out []string
	seen := map[string]bool{}
	for _, one := range []controller{c.memory, c.pids, c.cpu} {
		if one.version > 0 && !seen[one.parent] {
			seen[one.parent] = true
			out = append(out, one.parent)
		}
	}
	return out
}

// group is the control group of one box.
type group struct {
	dirs         []string
	memory, pids string // folder with the events, "" if not enforced here
	memoryV2     bool
}

// create makes the group and returns its cgroup.procs files, for init to pass to its commands.
func (c cgroups) create(l Limits) (g *group, procs []*os.File, err error) {
	g = &group{}
	defer func() {
		if err != nil {
			for _, f := range procs {
				f.Close()
			}
			g.remove()
		}
	}()
	name := groupName()
	paths := map[string]string{}
	for _, parent := range c.parents() {
		dir := filepath.Join(parent, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return nil, nil, err
		}
		g.dirs = append(g.dirs, dir)
		paths[parent] = dir
		f, err := os.OpenFile(filepath.Join(dir, "cgroup.procs"), os.O_WRONLY, 0)
		if err != nil {
			return nil, nil, err
		}
		procs = append(procs, f)
	}
	write := func(dir, file, value string) error {
		return os.WriteFile(filepath.Join(dir, file), []byte(value), 0)
	}
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	if c.memory.version > 0 {
		g.memory, g.memoryV2 = paths[c.memory.parent], c.memory.version == 2
		if g.memoryV2 {
			err = write(g.memory, "memory.max", number(l.MemoryBytes))
			_ = write(g.memory, "memory.swap.max", "0") // absent without swap accounting
		} else {
			err = write(g.memory, "memory.limit_in_bytes", number(l.MemoryBytes))
			_ = write(g.memory, "memory.memsw.limit_in_bytes", number(l.MemoryBytes))
		}
		if err != nil {
			return nil, nil, err
		}
	}
	if c.pids.version > 0 {
		g.pids = paths[c.pids.parent]
		if err = write(g.pids, "pids.max", strconv.Itoa(l.Pids)); err != nil {
			return nil, nil, err
		}
	}
	if c.cpu.version > 0 && l.CPUs > 0 {
		const period = 100_000
		quota, dir := number(int64(l.CPUs*period)), paths[c.cpu.parent]
		if c.cpu.version == 2 {
			err = write(dir, "cpu.max", quota+" "+number(period))
		} else {
			err = write(dir, "cpu.cfs_quota_us", quota)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	return g, procs, nil
}

// events are counters of a box's group; a command hit a limit if one of them grew.
type events struct{ oomKills, pidsMax, peak int64 }

func (g *group) events() (e events) {
	if g.memory != "" {
		file, peak := "memory.oom_control", "memory.max_usage_in_bytes"
		if g.memoryV2 {
			file, peak = "memory.events", "memory.peak"
		}
		e.oomKills = readKey(filepath.Join(g.memory, file), "oom_kill")
		e.peak = readKey(filepath.Join(g.memory, peak), "")
	}
	if g.pids != "" {
		e.pidsMax = readKey(filepath.Join(g.pids, "pids.events"), "max")
	}
	return e
}

// readKey reads the number of a line "key number", or of the file if the key is empty.
func readKey(path, key string) int64 {
	raw, _ := os.ReadFile(path)
	for line := range strings.SplitSeq(string(raw), "\n") {
		fields := strings.Fields(line)
		if key == "" && len(fields) == 1 || len(fields) == 2 && fields[0] == key {
			n, _ := strconv.ParseInt(fields[len(fields)-1], 10, 64)
			return n
		}
	}
	return 0
}

// remove deletes the group. Its processes are dead; the kernel may need a moment to notice.
func (g *group) remove() {
	for _, dir := range g.dirs {
		for wait := time.Millisecond; os.Remove(dir) != nil && wait < time.Second; wait *= 2 {
			if _, err := os.Stat(dir); err != nil {
				break
			}
			<-time.After(wait)
		}
	}
}
