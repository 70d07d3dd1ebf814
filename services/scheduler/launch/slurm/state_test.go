package slurm

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// These tests need no cluster.

func TestJobsAreFoundByTheirNonce(t *testing.T) {
	t.Parallel()
	got := parse("17|RUNNING|rollout:AB|None\n18|PENDING|(null)|Priority\n19|PENDING|rollout:CD|Resources|x\nslurm_load_jobs error\n")
	want := map[string]state{"AB": {"17", "RUNNING", "None"}, "CD": {"19", "PENDING", "Resources|x"}}
	if len(got) != 2 || got["AB"] != want["AB"] || got["CD"] != want["CD"] {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestStatesOfJobs(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"PENDING": "queued", "CONFIGURING": "queued", "RUNNING": "running", "COMPLETING": "running", "SUSPENDED": "running",
		"PREEMPTED": "left", "TIMEOUT": "left", "NODE_FAIL": "left", "CANCELLED": "left", "FAILED": "", "COMPLETED": "", "OUT_OF_MEMORY": "",
	} {
		s := state{name: name}
		if got := map[string]bool{"queued": s.queued(), "running": s.running(), "left": s.left(), "": !s.queued() && !s.running() && !s.left()}; !got[want] {
			t.Errorf("%s is not %q", name, want)
		}
	}
}

func TestArgumentsOfResources(t *testing.T) {
	t.Parallel()
	r := Resources{Partition: "gpu", Account: "lab", TimeLimit: "1-0", CPUs: 8, GPUs: 2, Memory: "64G", Options: []string{"--qos=high"}}
	want := []string{"--partition=gpu", "--account=lab", "--time=1-0", "--mem=64G", "--cpus-per-task=8", "--gpus=2", "--qos=high"}
	if got := r.arguments(); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := (Resources{}).arguments(); len(got) != 0 {
		t.Errorf("got %q without resources", got)
	}
}

// A job that Slurm has ended without a file of the script: what its state means.
func TestFinalStates(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		state    state
		known    bool
		stopping bool
		want     launch.Exit
	}{
		"preempted": {state{"7", "PREEMPTED", "None"}, true, false, launch.Exit{Code: -1, Left: "was ended by Slurm: job 7 is PREEMPTED"}},
		"failed":    {state{"7", "FAILED", "NonZeroExitCode"}, true, false, launch.Exit{Code: -1, NotStarted: "job 7 is FAILED (NonZeroExitCode)"}},
		"stopped":   {state{"7", "CANCELLED", "None"}, true, true, launch.Exit{Code: -1, Signal: "killed"}},
		"unknown":   {state{}, false, false, launch.Exit{Code: -1, Left: "was lost: Slurm does not know its job 7 any more"}},
	} {
		base := filepath.Join(t.TempDir(), "inference-0.AB")
		p := New(nil, time.Hour, 0).process(base, base+".log", 0)
		p.job, p.stopping, p.beats = "7", test.stopping, time.Now()
		for n := 1; !p.update(test.state, test.known, nil); n++ {
			if n > lostAfter {
				t.Fatalf("%s: no exit after %d answers", name, n)
			}
		}
		if got := p.Exit(); got.Code != test.want.Code || got.Left != test.want.Left || got.NotStarted != test.want.NotStarted || got.Signal != test.want.Signal {
			t.Errorf("%s: exit %+v, want %+v", name, got, test.want)
		}
	}
}

// The script quotes what it is given, and writes the exit of the worker.
func TestScript(t *testing.T) {
	t.Parallel()
	base := filepath.Join(t.TempDir(), "it's.AB")
	if err := os.WriteFile(base+".beat", []byte("1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := launch.Command{Args: []string{"/bin/sh", "-c", `echo "$SAID"; exit 3`}, Env: []string{"SAID=it's $HOME\"s"}}
	out, err := exec.Command("bash", "-c", script(c, base, time.Minute)).CombinedOutput()
	if err != nil || string(out) != "it's $HOME\"s\n" {
		t.Errorf("output %q, %v", out, err)
	}
	if text, _ := os.ReadFile(base + ".exit"); string(text) != "3 0\n" {
		t.Errorf("exit %q", text)
	}
	c.Args[0] = "/no/such"
	if out, err := exec.Command("bash", "-c", script(c, base, time.Minute)).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if text, _ := os.ReadFile(base + ".exit"); !strings.HasPrefix(string(text), "refused ") || !strings.HasSuffix(string(text), "cannot run /no/such\n") {
		t.Errorf("exit %q", text)
	}
}
