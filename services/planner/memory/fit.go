package memory

import (
	"fmt"
	"strings"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// Misfits says where the tensors that the processes hold all the time exceed the memory that there
// is. Only these are certain: what a step takes in addition depends on the lengths of the samples,
// and interpreters share the pages of their libraries.
func Misfits(config *configv1.RunConfig, report *planv1.MemoryReport) []string {
	var out []string
	if gpus := report.GetGpuBytes(); len(gpus) > 0 {
		for gpu, parts := range placed(config, report) {
			held := uint64(0)
			var who []string
			for _, p := range parts {
				held += OnDevice(p.GetHeld())
				who = append(who, fmt.Sprintf("%s %s", p.GetKind(), size(int64(OnDevice(p.GetHeld())))))
			}
			if held > gpus[gpu] {
				out = append(out, fmt.Sprintf("GPU %d has %s of memory, and the processes on it hold %s before the first step: %s",
					gpu, size(int64(gpus[gpu])), size(int64(held)), strings.Join(who, ", ")))
			}
		}
		return out
	}
	if has := report.GetHostBytes(); has > 0 && report.GetHeldBytes() > has {
		var who []string
		for _, p := range report.GetProcesses() {
			who = append(who, fmt.Sprintf("%d x %s %s", p.GetCount(), p.GetKind(), size(int64(Tensors(p)))))
		}
		out = append(out, fmt.Sprintf("the host has %s of memory, and the processes of the run hold %s before the first step: %s",
			size(int64(has)), size(int64(report.GetHeldBytes())), strings.Join(who, ", ")))
	}
	return out
}

// placed are the processes on each GPU, by the rule of rollout_workers/devices.py: the ranks take
// the first GPUs, inference workers and then reward workers the others in turn, or all in turn if
// none remain.
func placed(config *configv1.RunConfig, report *planv1.MemoryReport) [][]*planv1.ProcessMemory {
	gpus := len(report.GetGpuBytes())
	out := make([][]*planv1.ProcessMemory, gpus)
	ranks := int(max(1, config.GetTrain().GetRanks()))
	others := 0
	for _, p := range report.GetProcesses() {
		for number := range int(p.GetCount()) {
			if p.GetKind() != "learner" {
				number = others
				others++
			}
			at := number % gpus
			if left := gpus - ranks; p.GetKind() != "learner" && left > 0 {
				at = ranks + number%left
			}
			out[at] = append(out[at], p)
		}
	}
	return out
}
