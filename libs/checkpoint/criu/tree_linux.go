package criu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/rollout-rl/rollout/libs/checkpoint"
)

func proc(pid int, elem ...string) string {
	return filepath.Join(append([]string{"/proc", strconv.Itoa(pid)}, elem...)...)
}

// tree returns a process and its descendants, parents before their children.
func tree(pid int) ([]int, error) {
	found := []int{pid}
	for i := 0; i < len(found); i++ {
		lists, err := filepath.Glob(proc(found[i], "task", "*", "children"))
		if err != nil {
			return nil, err
		}
		for _, list := range lists {
			raw, err := os.ReadFile(list)
			if errors.Is(err, fs.ErrNotExist) {
				continue // the thread has ended
			}
			if err != nil {
				return nil, err
			}
			for text := range strings.FieldsSeq(string(raw)) {
				child, err := strconv.Atoi(text)
				if err != nil {
					return nil, err
				}
				found = append(found, child)
			}
		}
	}
	return found, nil
}

// checked are the lines of /proc/PID/status that a restored process has again.
var checked = []string{"Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters"}

// status returns the lines of /proc/PID/status by name.
func status(pid int) (map[string]string, error) {
	raw, err := os.ReadFile(proc(pid, "status"))
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	for text := range strings.Lines(string(raw)) {
		name, value, _ := strings.Cut(text, ":")
		found[name] = strings.Join(strings.Fields(value), " ")
	}
	return found, nil
}

// taskOf describes a process. Its limits are those that taskOf sees again after a restore.
func taskOf(pid int) (checkpoint.Task, map[string]string, error) {
	lines, err := status(pid)
	if err != nil {
		return checkpoint.Task{}, nil, err
	}
	task := checkpoint.Task{Limits: map[string]string{}}
	for _, name := range checked {
		if value, ok := lines[name]; ok {
			task.Limits[name] = value
		}
	}
	ids := strings.Fields(lines["NSpid"]) // the last one is that in its own namespace
	if len(ids) == 0 {
		return task, nil, fmt.Errorf("/proc/%d/status has no NSpid", pid)
	}
	if task.PID, err = strconv.Atoi(ids[len(ids)-1]); err != nil {
		return task, nil, err
	}
	command, err := os.ReadFile(proc(pid, "cmdline"))
	if err != nil {
		return task, nil, err
	}
	task.Command = strings.Split(strings.TrimRight(string(command), "\x00"), "\x00")
	raw, err := os.ReadFile(proc(pid, "limits"))
	if err != nil {
		return task, nil, err
	}
	const name, values = 26, 68 // columns of the table: Limit, and Soft Limit with Hard Limit
	for text := range strings.Lines(string(raw)) {
		if len(text) > values && !strings.HasPrefix(text, "Limit ") {
			task.Limits[strings.TrimSpace(text[:name])] = strings.Join(strings.Fields(text[name:values]), " ")
		}
	}
	return task, lines, nil
}

// confined returns an error if a process has limits that a restore could not put in force.
func confined(pid int, lines map[string]string) error {
	const fix = "save the state of the episode instead, which continues in a new box: `state_dict` of the environment, docs/environments.md"
	own, err := os.Readlink("/proc/self/ns/user")
	if err != nil {
		return err
	}
	theirs, err := os.Readlink(proc(pid, "ns", "user"))
	if err != nil {
		return err
	}
	switch {
	case own != theirs:
		return checkpoint.Fail(checkpoint.ReasonConfined, fix,
			"process %d (%s) is in another user namespace, as the boxes of rollout-sandbox are: CRIU restores neither their Landlock rules nor their mounts nor the watch of their system calls",
			pid, lines["Name"])
	case lines["NoNewPrivs"] == "1":
		return checkpoint.Fail(checkpoint.ReasonConfined, fix,
			"process %d (%s) has no_new_privs, so it may be restricted by Landlock: the kernel shows these rules to no one, and CRIU restores the process without them", pid, lines["Name"])
	}
	return nil
}

// lost returns the limits of a process that are not in force as they were, or "".
func lost(was, is map[string]string) string {
	var out []string
	for name, value := range was {
		if is[name] != value {
			out = append(out, fmt.Sprintf("%s was %q and is %q", name, value, is[name]))
		}
	}
	slices.Sort(out)
	return strings.Join(out, ", ")
}

// sameNamespace reports whether a process shares a namespace with this one.
func sameNamespace(pid int, kind string) (bool, error) {
	own, err := os.Readlink("/proc/thread-self/ns/" + kind)
	if err != nil {
		return false, err
	}
	theirs, err := os.Readlink(proc(pid, "ns", kind))
	return own == theirs, err
}
