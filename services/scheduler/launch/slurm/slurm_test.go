//go:build slurm

package slurm_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/launch/launchtest"
	"github.com/rollout-rl/rollout/services/scheduler/launch/slurm"
)

// These tests need a cluster: `scripts/slurm go test -tags slurm` (make check-slurm).

func command(t *testing.T, script string) launch.Command {
	return launch.Command{
		Worker: "inference-0", Kind: launchtest.Kind, Args: []string{"/bin/bash", "-c", script}, Env: []string{"PATH=/bin:/usr/bin"},
		Log: filepath.Join(t.TempDir(), "inference-0.log"), Keep: true,
	}
}

func start(t *testing.T, l *slurm.Launcher, c launch.Command) launch.Queued {
	t.Helper()
	p, err := l.Launch(c)
	if err != nil {
		t.Fatal(err)
	}
	return p.(launch.Queued)
}

func launcher(r slurm.Resources) *slurm.Launcher {
	return slurm.New(map[string]slurm.Resources{launchtest.Kind: r}, 10*time.Second, 200*time.Millisecond)
}

func await(t *testing.T, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(2 * time.Minute):
		t.Fatalf("%s has not happened", what)
	}
}

func slurmDo(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v: %s", name, args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func job(p launch.Process) string { return strings.Split(p.ID(), "-")[1] }

func TestLauncher(t *testing.T) { launchtest.Run(t, launcher(slurm.Resources{}), nil) }

func TestResourcesReachTheJob(t *testing.T) {
	t.Parallel()
	l := launcher(slurm.Resources{Partition: "high", TimeLimit: "7", CPUs: 2, Memory: "100M", Options: []string{"--nice=5"}})
	p := start(t, l, command(t, "sleep 1000"))
	defer p.Stop(0)
	shown := slurmDo(t, "scontrol", "show", "job", job(p))
	for _, want := range []string{"Partition=high", "TimeLimit=00:07:00", "MinMemoryNode=100M", "CPUs/Task=2", "Nice=5", "JobName=rollout-inference-0", "Requeue=0", "Comment=rollout:"} {
		if !strings.Contains(shown, want) {
			t.Errorf("the job has no %s:\n%s", want, shown)
		}
	}
}

func TestAQueuedJobSaysWhy(t *testing.T) {
	t.Parallel()
	p := start(t, launcher(slurm.Resources{Options: []string{"--begin=now+1hour"}}), command(t, "true"))
	deadline := time.After(time.Minute)
	for {
		select {
		case what := <-p.Awaits():
			if what.What == "Slurm job" && what.Detail == "job "+job(p)+" is PENDING: BeginTime" {
				p.Stop(time.Hour)
				if state := slurmDo(t, "squeue", "-h", "-t", "all", "-o", "%T", "-j", job(p)); state != "CANCELLED" {
					t.Errorf("the stopped job is %s", state)
				}
				return
			}
		case <-deadline:
			t.Fatal("no reason")
		}
	}
}

func TestARefusedSubmissionIsAnError(t *testing.T) {
	t.Parallel()
	p, err := launcher(slurm.Resources{Partition: "none"}).Launch(command(t, "true"))
	if err == nil || !strings.Contains(err.Error(), "invalid partition") {
		t.Errorf("%v, %v", p, err)
	}
}

// What Slurm does to a job is not a crash of its worker.
func TestJobsThatSlurmEndsHaveLeft(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(t *testing.T, job string){
		"cancelled by a person": func(t *testing.T, job string) { slurmDo(t, "scancel", job) },
		"notice of the end":     func(t *testing.T, job string) { slurmDo(t, "scancel", "--batch", "--signal=TERM", job) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := command(t, "trap 'echo drained; exit 0' TERM; echo up; while :; do sleep 0.05; done")
			p := start(t, launcher(slurm.Resources{}), c)
			await(t, "the start", p.Began())
			printed(t, c, "up")
			end(t, job(p))
			await(t, "the exit", p.Done())
			want := "was asked to stop by Slurm: job " + job(p) + " was cancelled, is preempted, or reaches its time limit"
			if e := p.Exit(); e.Left != want {
				t.Errorf("exit %+v, want %q", e, want)
			}
		})
	}
}

func TestAJobIsAdopted(t *testing.T) {
	t.Parallel()
	first, second := launcher(slurm.Resources{}), launcher(slurm.Resources{})
	p := start(t, first, command(t, "while :; do sleep 0.05; done"))
	await(t, "the start", p.Began())
	owned := p.(launch.Kept)
	owned.Release(0)
	again, err := second.Adopt(owned.Handle())
	if err != nil {
		t.Fatal(err)
	}
	if again.ID() != p.ID() {
		t.Errorf("adopted %s, want %s", again.ID(), p.ID())
	}
	await(t, "the start of the adopted process", again.(launch.Queued).Began())
	again.Stop(0)
	if _, err := second.Adopt(owned.Handle()); !errors.Is(err, launch.ErrGone) {
		t.Errorf("adopt a process that has ended: %v", err)
	}
}

// No job outlives its scheduler by more than the grace period.
func TestAJobWithoutAnOwnerStops(t *testing.T) {
	t.Parallel()
	c := command(t, "trap 'echo drained; exit 0' TERM; while :; do sleep 0.05; done")
	p := start(t, launcher(slurm.Resources{}), c)
	await(t, "the start", p.Began())
	p.(launch.Kept).Release(0)
	printed(t, c, "drained")
}

// printed waits until the log has a text.
func printed(t *testing.T, c launch.Command, want string) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for range 2400 {
		if text, _ := os.ReadFile(c.Log); strings.Contains(string(text), want) {
			return
		}
		<-tick.C
	}
	t.Fatalf("%s does not contain %q", c.Log, want)
}
