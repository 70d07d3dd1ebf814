package slurm

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
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
		began    bool
		stopping bool
		want     launch.Exit
	}{
		"preempted":               {state{"7", "PREEMPTED", "None"}, true, true, false, launch.Exit{Code: -1, Left: "was ended by Slurm: job 7 is PREEMPTED"}},
		"failed":                  {state{"7", "FAILED", "NonZeroExitCode"}, true, false, false, launch.Exit{Code: -1, NotStarted: "job 7 is FAILED (NonZeroExitCode)"}},
		"stopped":                 {state{"7", "CANCELLED", "None"}, true, true, true, launch.Exit{Code: -1, Signal: "killed"}},
		"unknown":                 {state{}, false, true, false, launch.Exit{Code: -1, Left: "was lost: Slurm does not know its job 7 any more"}},
		"unknown before it began": {state{}, false, false, false, launch.Exit{Code: -1, NotStarted: "Slurm does not know its job 7 any more"}},
		"unknown and stopped":     {state{}, false, true, true, launch.Exit{Code: -1, Signal: "killed"}},
	} {
		base := filepath.Join(t.TempDir(), "inference-0.AB")
		p := New(nil, time.Hour, 0).process(base, base+".log", 0)
		p.job, p.stopping, p.beats = "7", test.stopping, time.Now()
		if test.began {
			p.begin()
		}
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

// cluster is a Slurm whose scancel fails a number of times and then ends a job.
type cluster struct {
	mu       sync.Mutex
	job      *process
	state    string
	failures int
	calls    []string // of scancel
}

func (c *cluster) call(command string, args ...string) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if command == "squeue" {
		return "7|" + c.state + "|" + mark + c.job.nonce + "|None\n", nil
	}
	c.calls = append(c.calls, strings.Join(args, " "))
	if c.failures--; c.failures < 0 {
		c.state = "CANCELLED"
	}
	return "", errors.New("slurmctld does not answer")
}

// A request to end a job that slurmctld did not get is repeated.
func TestStopIsRepeatedUntilTheJobHasEnded(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		state, again string
		grace        time.Duration
	}{
		"a running job is asked to finish": {"RUNNING", "--batch --signal=USR2 7", time.Hour},
		"a running job is killed":          {"RUNNING", "--full --signal=KILL 7", 0},
		"a job that waits is cancelled":    {"PENDING", "7", time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := New(nil, time.Hour, time.Millisecond)
			base := filepath.Join(t.TempDir(), "inference-0.AB")
			p := l.process(base, base+".log", 0)
			p.job = "7"
			slurm := &cluster{job: p, state: test.state, failures: 5}
			l.call = slurm.call
			if test.state == "RUNNING" {
				p.begin()
			}
			l.own(p, false)
			go p.Stop(test.grace)
			select {
			case <-p.Done():
			case <-time.After(30 * time.Second):
				t.Fatal("the job has not ended")
			}
			if exit := p.Exit(); exit.Signal != "killed" {
				t.Errorf("exit %+v", exit)
			}
			slurm.mu.Lock()
			defer slurm.mu.Unlock()
			if n := len(slurm.calls); n <= 5 || slices.Index(slurm.calls[2:], test.again) < 0 {
				t.Errorf("calls %q", slurm.calls)
			}
		})
	}
}

// While Slurm does not answer, the job that should stop gets no beat after the grace period of the
// stop, so its script ends the worker, and the stop does not wait for Slurm for ever.
func TestStopWithoutSlurm(t *testing.T) {
	t.Parallel()
	p := written(t, launch.Command{Args: []string{"/bin/true"}})
	p.begin()
	p.stopping, p.deadline, p.beats = true, time.Now().Add(time.Hour), time.Time{}
	away := errors.New("slurmctld does not answer")
	before := p.read(".beat")
	if p.update(state{}, false, away) || p.read(".beat") == before || p.read(".beat") == "" {
		t.Errorf("beat %q of a job in its grace period, before %q", p.read(".beat"), before)
	}
	p.deadline, p.beats = time.Now().Add(-time.Second), time.Time{}
	if p.update(state{}, false, away) || p.read(".beat") != "" {
		t.Errorf("beat %q after the grace period", p.read(".beat"))
	}
	p.deadline = time.Now().Add(-p.owner.grace - stopMargin)
	if !p.update(state{}, false, away) {
		t.Fatal("the job has not ended after the grace period of its script")
	}
	if exit := p.Exit(); exit.Code != -1 || exit.Signal != "killed" {
		t.Errorf("exit %+v", exit)
	}
}

// written is a job whose files are written.
func written(t *testing.T, c launch.Command) *process {
	t.Helper()
	base := filepath.Join(t.TempDir(), "it's.AB")
	p := New(nil, time.Minute, 0).process(base, base+".log", 0)
	if err := p.write(c); err != nil {
		t.Fatal(err)
	}
	return p
}

// bash runs the script of a job in an environment.
func (p *process) bash(t *testing.T, environ ...string) string {
	t.Helper()
	cmd := exec.Command("bash", p.base+".sh")
	cmd.Env = append(os.Environ(), environ...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
	return string(out)
}

func (p *process) read(extension string) string {
	text, _ := os.ReadFile(p.base + extension)
	return string(text)
}

// The script quotes what it is given, and writes the exit of the worker.
func TestScript(t *testing.T) {
	t.Parallel()
	p := written(t, launch.Command{Args: []string{"/bin/sh", "-c", `echo "$SAID"; exit 3`}, Env: []string{"SAID=it's $HOME\"s"}})
	if out := p.bash(t); out != "it's $HOME\"s\n" {
		t.Errorf("output %q", out)
	}
	if text := p.read(".exit"); text != "3 0\n" {
		t.Errorf("exit %q", text)
	}
	p = written(t, launch.Command{Args: []string{"/no/such"}})
	p.bash(t)
	if text := p.read(".exit"); !strings.HasPrefix(text, "refused ") || !strings.HasSuffix(text, "cannot run /no/such\n") {
		t.Errorf("exit %q", text)
	}
}

// The signals of the scheduler and of Slurm reach the worker once.
func TestTheScriptPassesSignalsOn(t *testing.T) {
	t.Parallel()
	for sent, want := range map[syscall.Signal]string{syscall.SIGUSR2: "0 2\n", syscall.SIGTERM: "0 1\n"} {
		p := written(t, launch.Command{Args: []string{"/bin/bash", "-c", "trap 'echo asked; sleep 0.3; exit 0' TERM; echo up; while :; do sleep 0.02; done"}})
		cmd := exec.Command("bash", p.base+".sh")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for _, line := range []string{"up", "asked"} {
			if !lines.Scan() || lines.Text() != line {
				t.Errorf("%v: output %q, want %q", sent, lines.Text(), line)
			}
			_ = cmd.Process.Signal(sent) // twice, as a repeated scancel
		}
		if lines.Scan() {
			t.Errorf("%v: output %q", sent, lines.Text())
		}
		if err := cmd.Wait(); err != nil || p.read(".exit") != want {
			t.Errorf("%v: exit %q, want %q, %v", sent, p.read(".exit"), want, err)
		}
	}
}

// The environment of a worker is in a private file, not in the script or in arguments.
func TestTheEnvironmentIsNotInTheScript(t *testing.T) {
	t.Parallel()
	p := written(t, launch.Command{
		Args: []string{"/usr/bin/env"}, Env: []string{"KEY=a secret\nof two lines", "base=x", "BASH_FUNC_f%%=() { :; }", "CUDA_VISIBLE_DEVICES=9"},
	})
	if strings.Contains(p.read(".sh"), "secret") {
		t.Errorf("the script contains the secret:\n%s", p.read(".sh"))
	}
	if info, err := os.Stat(p.base + ".env"); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	var got []string
	for line := range strings.Lines(p.bash(t, "CUDA_VISIBLE_DEVICES=3", "SLURM_JOB_ID=1", "base=y", "BASH_FUNC_g%%=() { :; }")) {
		if !strings.HasPrefix(line, "_=") { // of Bash
			got = append(got, strings.TrimSpace(line))
		}
	}
	slices.Sort(got)
	if want := []string{"CUDA_VISIBLE_DEVICES=3", "KEY=a secret", "base=x", "of two lines"}; !slices.Equal(got, want) {
		t.Errorf("environment %q, want %q", got, want)
	}
	p.forget()
	if left, _ := filepath.Glob(filepath.Dir(p.base) + "/*"); len(left) != 0 {
		t.Errorf("files %q are left", left)
	}
}

// A job that starts after the launcher has given it up runs nothing: it would read the spec of
// another launch.
func TestAJobThatWasGivenUpRefuses(t *testing.T) {
	t.Parallel()
	p := written(t, launch.Command{Args: []string{"/bin/echo", "ran"}})
	if err := os.Remove(p.base + ".beat"); err != nil {
		t.Fatal(err)
	}
	if out := p.bash(t); out != "" {
		t.Errorf("output %q", out)
	}
	if text := p.read(".exit"); text != "refused the scheduler has given up this job\n" {
		t.Errorf("exit %q", text)
	}
}

// The last lines of a long log are read from its end.
func TestTheEndOfALongLogIsRead(t *testing.T) {
	t.Parallel()
	p := written(t, launch.Command{Args: []string{"/bin/true"}})
	long := strings.Repeat("x", 100<<10)
	if err := os.WriteFile(p.log, []byte(strings.Repeat(long+"\n", 10)+"last\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := p.lines(); !slices.Equal(got, []string{long, long, "last"}) {
		t.Errorf("%d lines", len(got))
	}
	p.offset = 10*int64(len(long)+1) + 2
	if got := p.lines(); !slices.Equal(got, []string{"st"}) {
		t.Errorf("lines after the offset %q", got)
	}
}
