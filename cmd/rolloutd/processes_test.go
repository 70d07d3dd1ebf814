package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestProcessesOfARunAreTheChildrenOfItsWorkers(t *testing.T) {
	t.Parallel()
	proc := t.TempDir()
	for pid, files := range map[string][3]string{
		"10": {"python\x00-m\x00rollout_workers\x00", "PPid:\t1\n", "A=b\x00ROLLOUT_WORKER_SPEC=/state/runs/run-1/workers/inference-1.json\x00"},
		"11": {"python\x00-m\x00rollout_workers\x00", "PPid:\t1\n", "ROLLOUT_WORKER_SPEC=/state/runs/run-2/workers/inference-1.json\x00"},
		"20": {"python\x00-m\x00rollout.hosting.child\x00", "Name:\tpython\nPPid:\t10\n", ""},
		"9":  {"python\x00-m\x00rollout.hosting.child\x00", "PPid:\t10\n", ""},
		"21": {"python\x00-m\x00rollout.hosting.child\x00", "PPid:\t11\n", ""}, // of another run
		"22": {"python\x00train.py\x00", "PPid:\t10\n", ""},                    // another program
		"23": {"python\x00-m\x00rollout.hosting.child\x00", "PPid:\t99\n", ""}, // its parent has ended
	} {
		dir := filepath.Join(proc, pid)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for i, name := range []string{"cmdline", "status", "environ"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(files[i]), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got, err := (processes{proc: proc}).Of("run-1"); err != nil || !slices.Equal(got, []int{9, 20}) {
		t.Errorf("run-1: %v, %v", got, err)
	}
	if got, err := (processes{proc: proc}).Of("run-3"); err != nil || len(got) != 0 {
		t.Errorf("run-3: %v, %v", got, err)
	}
}
