package scheduler

import (
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/rollout-rl/rollout/libs/wait"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

// osProcess is what the kernel knows of a process.
type osProcess struct {
	pid   int
	state string // a letter, see proc(5)
}

// osProcesses are the processes of this host by their parent; empty on other systems than Linux.
type osProcesses map[int][]osProcess

// readProcesses reads the processes of this host.
func readProcesses() osProcesses {
	table := osProcesses{}
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if parent, p, found := readProcess(pid); found {
			table[parent] = append(table[parent], p)
		}
	}
	return table
}

// readProcess returns a process and its parent; false if it has just exited.
func readProcess(pid int) (parent int, p osProcess, found bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, osProcess{}, false
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:])) // the name may contain spaces
	if len(fields) < 2 {
		return 0, osProcess{}, false
	}
	parent, err = strconv.Atoi(fields[1])
	return parent, osProcess{pid: pid, state: fields[0]}, err == nil
}

// waits is what the kernel knows of the processes of a worker: that one is stopped by a signal,
// such as a rank of the learner or the process of a reward, or that the worker waits for a disk.
func (t osProcesses) waits(w *runv1.Worker) []*waitv1.Wait {
	pid := int(w.GetPid())
	if pid == 0 {
		return nil
	}
	_, own, found := readProcess(pid)
	if !found {
		return nil
	}
	name, frozen := fmt.Sprintf("the process of %s (%d)", w.GetWorkerId(), pid), frozenBy(pid)
	switch by := tracer(pid); {
	case own.stopped():
		return []*waitv1.Wait{stopped(w, pid, name)}
	case own.state == "Z" && by != 0:
		return []*waitv1.Wait{{
			Owner: wait.User, Reason: wait.WorkerStopped, Subjects: []string{w.GetWorkerId()},
			Evidence: fmt.Sprintf("%s was killed, and a debugger, the process %d (%s), keeps it", name, by, command(by)),
			Fix:      fmt.Sprintf("quit the debugger, or end it: `kill %d`; the worker is then started again", by),
		}}
	case frozen != "":
		value := "0"
		if strings.HasSuffix(frozen, "freezer.state") {
			value = "THAWED"
		}
		return []*waitv1.Wait{{
			Owner: wait.User, Reason: wait.WorkerStopped, Subjects: []string{w.GetWorkerId()},
			Evidence: name + " is frozen by its control group " + strings.TrimPrefix(path.Dir(frozen), cgroups),
			Fix:      fmt.Sprintf("thaw it: `docker unpause` if it is a container, otherwise `echo %s > %s`", value, frozen),
		}}
	case own.state == "D":
		return []*waitv1.Wait{{
			Owner: wait.User, Reason: wait.WorkerInIO, Subjects: []string{w.GetWorkerId()}, Evidence: name + " waits in the kernel, for a disk or a network file system",
			Fix: "check the disks and mounts that the worker uses (`dmesg`, `mount`)",
		}}
	}
	if child := t.stoppedBelow(pid, namespace(pid)); child != 0 {
		return []*waitv1.Wait{stopped(w, child, fmt.Sprintf("process %d of %s (%s)", child, w.GetWorkerId(), command(child)))}
	}
	return nil
}

const cgroups = "/sys/fs/cgroup"

// frozenBy is the file of the control group that freezes a process, or one above; "" if none does.
func frozenBy(pid int) string {
	text, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) < 3 {
			continue
		}
		root, file := cgroups, "cgroup.freeze" // version 2
		switch parts[1] {
		case "":
		case "freezer": // version 1
			root, file = cgroups+"/freezer", "freezer.self_freezing"
		default:
			continue
		}
		for group := path.Clean("/" + parts[2]); group != "/"; group = path.Dir(group) {
			state, _ := os.ReadFile(root + group + "/" + file)
			if strings.TrimSpace(string(state)) == "1" {
				return root + group + "/" + strings.Replace(file, "self_freezing", "state", 1)
			}
		}
	}
	return ""
}

func (p osProcess) stopped() bool { return p.state == "T" || p.state == "t" }

func stopped(w *runv1.Worker, pid int, name string) *waitv1.Wait {
	made := &waitv1.Wait{
		Owner: wait.User, Reason: wait.WorkerStopped, Subjects: []string{w.GetWorkerId()}, Evidence: name + " is stopped by a signal or a debugger", Fix: fmt.Sprintf("continue it: `kill -CONT %d`", pid),
	}
	if by := tracer(pid); by != 0 {
		made.Evidence = fmt.Sprintf("%s is stopped by a debugger, the process %d (%s)", name, by, command(by))
		made.Fix = fmt.Sprintf("continue it in the debugger, or end the debugger: `kill %d`", by)
	}
	return made
}

// tracer is the process that traces another one, such as a debugger; 0 without one.
func tracer(pid int) int {
	text, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, "TracerPid:"); found {
			by, _ := strconv.Atoi(strings.TrimSpace(value))
			return by
		}
	}
	return 0
}

// stoppedBelow is a stopped descendant of a process; 0 without one. Those in another namespace are
// left out: code in a sandbox may stop its own processes.
func (t osProcesses) stoppedBelow(pid int, within string) int {
	for _, child := range t[pid] {
		if namespace(child.pid) != within {
			continue
		}
		if child.stopped() {
			return child.pid
		}
		if found := t.stoppedBelow(child.pid, within); found != 0 {
			return found
		}
	}
	return 0
}

// namespace identifies the PID namespace of a process; "" if it can't be read.
func namespace(pid int) string {
	link, _ := os.Readlink("/proc/" + strconv.Itoa(pid) + "/ns/pid")
	return link
}

// mostCommand is the number of bytes of a command line that a sentence contains.
const mostCommand = 80

// command is the beginning of the command line of a process.
func command(pid int) string {
	text, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	line := strings.Join(strings.Fields(strings.ReplaceAll(string(text), "\x00", " ")), " ") // one, also of `python -c` with a program
	if len(line) > mostCommand {
		line = strings.ToValidUTF8(line[:mostCommand], "") + "..."
	}
	return line
}
