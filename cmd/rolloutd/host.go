package main

import (
	"context"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"

	"github.com/rollout-rl/rollout/services/planner"
)

// nvidiaTime is the time limit of nvidia-smi, which waits for a driver that is starting.
const nvidiaTime = 10 * time.Second

// hostMemory returns the memory of this host, or of the control group of this process if that is
// less, and of the GPUs that workers with an environment see.
func hostMemory(environ []string) func(context.Context) planner.Host {
	return func(ctx context.Context) planner.Host {
		var host planner.Host
		for _, read := range []memlimit.Provider{memlimit.FromSystem, memlimit.FromCgroup} {
			if n, err := read(); err == nil && n > 0 && (host.Memory == 0 || n < host.Memory) { // an error: no limit is known
				host.Memory = n
			}
		}
		ctx, cancel := context.WithTimeout(ctx, nvidiaTime)
		defer cancel()
		command := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
		command.WaitDelay = time.Second
		text, err := command.Output()
		if err != nil {
			return host // a host without GPUs has no nvidia-smi
		}
		host.GPUs = visible(gpusOf(string(text)), environ)
		return host
	}
}

type gpu struct {
	index, uuid string
	bytes       uint64
}

// gpusOf reads lines of nvidia-smi: "0, GPU-5e0f..., 81559".
func gpusOf(text string) []gpu {
	var out []gpu
	for line := range strings.Lines(text) {
		fields := strings.Split(strings.TrimSpace(line), ", ")
		if len(fields) != 3 {
			continue
		}
		mib, err := strconv.ParseUint(fields[2], 10, 64)
		if err != nil {
			continue
		}
		out = append(out, gpu{fields[0], fields[1], mib << 20})
	}
	return out
}

// visible is the memory of the GPUs that CUDA_VISIBLE_DEVICES selects, in its order. Like CUDA it
// ends at the first that does not exist.
func visible(gpus []gpu, environ []string) []uint64 {
	const variable = "CUDA_VISIBLE_DEVICES="
	var out []uint64
	at := slices.IndexFunc(environ, func(e string) bool { return strings.HasPrefix(e, variable) })
	if at < 0 {
		for _, g := range gpus {
			out = append(out, g.bytes)
		}
		return out
	}
	for _, name := range strings.Split(strings.TrimPrefix(environ[at], variable), ",") {
		name = strings.TrimSpace(name)
		found := slices.IndexFunc(gpus, func(g gpu) bool {
			return name != "" && (g.index == name || strings.HasPrefix(name, "GPU-") && strings.HasPrefix(g.uuid, name))
		})
		if found < 0 {
			break
		}
		out = append(out, gpus[found].bytes)
	}
	return out
}
