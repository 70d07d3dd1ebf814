package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

const smi = "0, GPU-aa11, 81559\n1, GPU-bb22, 81559\n2, GPU-cc33, 24576\n"

func TestTheHostHasTheGpusThatWorkersSee(t *testing.T) {
	t.Parallel()
	const large, small = 81559 << 20, 24576 << 20
	for selected, want := range map[string][]uint64{
		"0,2":         {large, small},
		"2":           {small},
		"":            nil,
		"-1":          nil,
		"1,7,2":       {large},
		"GPU-cc,0":    {small, large},
		"GPU-nothing": nil,
	} {
		if got := visible(gpusOf(smi), []string{"HOME=/root", "CUDA_VISIBLE_DEVICES=" + selected}); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", selected, got, want)
		}
	}
	if got := visible(gpusOf(smi), nil); !slices.Equal(got, []uint64{large, large, small}) {
		t.Errorf("without the variable: %v", got)
	}
	if got := gpusOf("NVIDIA-SMI has failed\n0, GPU-aa, [N/A]\n"); len(got) != 0 {
		t.Errorf("%v", got)
	}
}

func TestTheMemoryOfTheHostIsRead(t *testing.T) {
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "nvidia-smi"), []byte("#!/bin/sh\nprintf '0, GPU-aa11, 81559\\n'\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	host := hostMemory(nil)(t.Context())
	if host.Memory < 1<<28 || len(host.GPUs) != 1 || host.GPUs[0] != 81559<<20 {
		t.Errorf("%+v", host)
	}
	t.Setenv("PATH", t.TempDir())
	if host := hostMemory(nil)(t.Context()); host.Memory == 0 || len(host.GPUs) != 0 {
		t.Errorf("without nvidia-smi: %+v", host)
	}
}
