package sandbox

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// watch has the limits that init enforces itself where cgroups are not available.
type watch struct {
	MemoryBytes int64 `json:"memory_bytes,omitempty"`
	Pids        int   `json:"pids,omitempty"`
}

// Init looks at commands at least every watchMost. A command that is near its memory limit is
// looked at again before it can reach it at touchRate bytes per second, but not before watchLeast.
const (
	watchLeast = 20 * time.Millisecond
	watchMost  = 200 * time.Millisecond
	touchRate  = 2 << 30
)

// observe checks the limits of a command that no system call reports, until it ends.
func (b *initBox) observe(c *command) {
	timer := time.NewTimer(watchLeast)
	defer timer.Stop()
	for {
		select {
		case <-c.ended:
			return
		case <-timer.C:
			timer.Reset(b.check(c))
		}
	}
}

// check records the limits that were reached and returns when to check again.
func (b *initBox) check(c *command) time.Duration {
	var s unix.Statfs_t
	if unix.Statfs(home, &s) == nil && (s.Bavail == 0 || s.Ffree == 0) {
		b.reach(c, LimitDisk)
	}
	w := b.setup.Watch
	if w == nil || w.MemoryBytes == 0 {
		return watchMost
	}
	var rss, largest int64
	var victim int
	all := processes()
	for _, p := range all {
		rss += p.rss
		if p.rss > largest {
			victim, largest = p.pid, p.rss
		}
	}
	// Pages that processes share count once, which is slower to read.
	if rss > w.MemoryBytes && proportional(all) > w.MemoryBytes {
		b.reach(c, LimitMemory)
		_ = unix.Kill(victim, unix.SIGKILL)
	}
	left := time.Duration(float64(w.MemoryBytes-rss) / touchRate * float64(time.Second))
	return min(max(left, watchLeast), watchMost)
}

// observeKept watches what a command left running, until it ends or until the time is up: the wall
// time of a command is that of all it started. The kept processes of several commands can't be
// distinguished, so they end with the last of these times.
func (b *initBox) observeKept(c *command) {
	b.mu.Lock()
	if c.until.IsZero() {
		b.keepForever = true
	}
	if c.until.After(b.keepUntil) {
		b.keepUntil = c.until
	}
	b.mu.Unlock()
	wait := watchLeast
	for {
		<-time.After(wait)
		wait = b.check(c)
		b.mu.Lock()
		none := len(b.strays()) == 0
		late := !b.keepForever && time.Now().After(b.keepUntil)
		b.mu.Unlock()
		if none {
			return
		}
		if late {
			b.killStrays()
			return
		}
	}
}

func (b *initBox) reach(c *command, reason string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c.hit[reason] = true
}

// mayFork reports whether the limit of processes and threads allows one more. The kernel enforces
// the limit, too, and does not report it.
func (b *initBox) mayFork(c *command) bool {
	threads := 0
	for _, p := range allProcesses() {
		threads += p.threads
	}
	if threads < b.setup.Watch.Pids {
		return true
	}
	b.reach(c, LimitPids)
	return false
}

// process is an entry of /proc.
type process struct {
	pid, parent, threads int
	rss                  int64 // bytes
	state                byte
}

// processes returns the processes of the box, without init and zombies.
func processes() []process {
	return slices.DeleteFunc(allProcesses(), func(p process) bool { return p.state == 'Z' && p.threads <= 1 || p.state == 'X' })
}

// allProcesses returns the processes of the box without init. A zombie counts until it is reaped.
func allProcesses() []process {
	var out []process
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == 1 {
			continue
		}
		dir := filepath.Join("/proc", entry.Name())
		p, ok := readStat(filepath.Join(dir, "stat"))
		if !ok {
			continue
		}
		p.pid = pid
		if p.state == 'Z' && p.threads > 1 { // its first thread has ended: another one has the state and the memory
			tasks, _ := os.ReadDir(filepath.Join(dir, "task"))
			for _, task := range tasks {
				if q, ok := readStat(filepath.Join(dir, "task", task.Name(), "stat")); ok && q.state != 'Z' && q.state != 'X' {
					p.state, p.rss = q.state, q.rss
					break
				}
			}
		}
		out = append(out, p)
	}
	return out
}

// readStat reads the stat file of a process or a thread.
func readStat(path string) (process, bool) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return process{}, false
	}
	fields := bytes.Fields(raw[bytes.LastIndexByte(raw, ')')+1:])
	if len(fields) < 22 {
		return process{}, false
	}
	number := func(i int) int { n, _ := strconv.Atoi(string(fields[i])); return n }
	return process{parent: number(1), threads: max(1, number(17)), rss: int64(number(21)) * int64(os.Getpagesize()), state: fields[0][0]}, true
}

// proportional sums the memory of processes, each shared page once.
func proportional(all []process) (sum int64) {
	for _, p := range all {
		raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.pid), "smaps_rollup"))
		if err != nil {
			sum += p.rss // it made itself unreadable: count all of it
			continue
		}
		for line := range bytes.Lines(raw) {
			if rest, ok := bytes.CutPrefix(line, []byte("Pss:")); ok {
				n, _ := strconv.ParseInt(string(bytes.Fields(rest)[0]), 10, 64)
				sum += n << 10
			}
		}
	}
	return sum
}

// kill ends a command; finish ends what it started.
func (b *initBox) kill(id int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.commands[id]; c != nil {
		c.keep = false
		_ = unix.Kill(c.pid, unix.SIGKILL)
	}
}

// strayGrace is how long killed processes may take to end. On a machine with many runnable
// processes that takes longer than a second.
const strayGrace = 10 * time.Second

// killStrays kills every process that no running command is an ancestor of, also daemons. It
// reports whether none is left.
func (b *initBox) killStrays() bool {
	for deadline := time.Now().Add(strayGrace); time.Now().Before(deadline); {
		b.mu.Lock()
		left := b.strike()
		b.mu.Unlock()
		if !left {
			return true
		}
		<-time.After(time.Millisecond)
	}
	return false
}

// strike sends SIGKILL to the strays and reports whether there were any. The caller has the lock.
func (b *initBox) strike() bool {
	if len(b.commands)+len(b.stages) == 0 {
		_ = unix.Kill(-1, unix.SIGKILL) // all but init, at once
		return len(processes()) > 0
	}
	// Stopped processes do not fork: first stop all, so that none is missed.
	for range 100 {
		fresh := 0
		for _, p := range b.strays() {
			if p.state != 'T' {
				fresh++
				_ = unix.Kill(p.pid, unix.SIGSTOP)
			}
		}
		if fresh == 0 {
			break
		}
	}
	strays := b.strays()
	for _, p := range strays {
		_ = unix.Kill(p.pid, unix.SIGKILL)
	}
	return len(strays) > 0
}

// strays returns the processes below no running command.
func (b *initBox) strays() []process {
	all := processes()
	parents := map[int]int{}
	for _, p := range all {
		parents[p.pid] = p.parent
	}
	running := maps.Clone(b.stages)
	for _, c := range b.commands {
		running[c.pid] = true
	}
	var out []process
	for _, p := range all {
		at := p.pid
		for at > 1 && !running[at] {
			at = parents[at]
		}
		if at <= 1 {
			out = append(out, p)
		}
	}
	return out
}
