package main

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/program"
	"github.com/rollout-rl/rollout/libs/checkpoint"
	"github.com/rollout-rl/rollout/libs/checkpoint/criu"
)

// processes finds and saves the processes of environments on this host, children of its workers.
type processes struct {
	checkpoint.Checkpointer
	proc string // the folder /proc
}

func newProcesses() processes {
	found, _ := program.Find("criu") // a call reports that it is missing
	return processes{Checkpointer: criu.New(found), proc: "/proc"}
}

const (
	environmentModule = "rollout.hosting.child"
	specVariable      = "ROLLOUT_WORKER_SPEC="
)

// Of implements snapshot.Processes.
func (p processes) Of(run string) ([]int, error) {
	lines, err := filepath.Glob(filepath.Join(p.proc, "[0-9]*", "cmdline"))
	if err != nil {
		return nil, err
	}
	var found []int
	for _, line := range lines {
		command, err := os.ReadFile(line)
		if err != nil || !slices.Contains(strings.Split(string(command), "\x00"), environmentModule) {
			continue // it has ended, or is another program
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(line)))
		if err == nil && p.runOf(p.parent(pid)) == run {
			found = append(found, pid)
		}
	}
	slices.Sort(found)
	return found, nil
}

// parent returns the id of the parent of a process, "" if it has ended.
func (p processes) parent(pid int) string {
	raw, _ := os.ReadFile(filepath.Join(p.proc, strconv.Itoa(pid), "status"))
	for text := range strings.Lines(string(raw)) {
		if value, ok := strings.CutPrefix(text, "PPid:"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// runOf returns the run of a worker, whose spec is RUN/workers/ID.json, "" if it is no worker or
// belongs to a user whose processes this one may not read.
func (p processes) runOf(pid string) string {
	raw, _ := os.ReadFile(filepath.Join(p.proc, pid, "environ"))
	for variable := range strings.SplitSeq(string(raw), "\x00") {
		if spec, ok := strings.CutPrefix(variable, specVariable); ok {
			return filepath.Base(filepath.Dir(filepath.Dir(spec)))
		}
	}
	return ""
}
