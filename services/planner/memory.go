package planner

import (
	"context"
	"fmt"
	"strings"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/memory"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// Host is the memory of the host that runs the workers, in bytes.
type Host struct {
	Memory uint64   // 0: unknown
	GPUs   []uint64 // of each GPU that workers see
}

// memoryCheck predicts the memory of the run's processes and compares it with that of the host.
type memoryCheck struct {
	config   *configv1.RunConfig
	findings findings
	host     func(context.Context) Host // nil: unknown
}

// report predicts the memory; nil if the model's shape is not known. assumed: a host to predict for
// instead of the real one; nil: none. A run that does not fit the real host is a problem.
func (d *memoryCheck) report(ctx context.Context, model *modelCheck, teacher *teacherCheck, rewards *rewardCheck, assumed *planv1.AssumedHost) *planv1.MemoryReport {
	if model.model == nil || d.config.GetMultistep() != nil {
		return nil
	}
	sizes, ok := memory.Of(d.config, model.model, teacher.model)
	if !ok {
		return nil
	}
	sizes.Scorers = rewards.scorers
	host := Host{Memory: assumed.GetMemoryBytes(), GPUs: assumed.GetGpuBytes()}
	if assumed == nil && d.host != nil {
		host = d.host(ctx)
	}
	report := memory.Report(d.config, sizes, host.GPUs)
	report.HostBytes = host.Memory
	report.Misfits = memory.Misfits(d.config, report)
	if assumed != nil {
		return report
	}
	for _, misfit := range report.GetMisfits() {
		d.findings.report("model.path", problem.TooLarge, misfit, d.fix(len(host.GPUs) > 0))
	}
	return report
}

// fix lists the keys that make the run smaller and are not set yet.
func (d *memoryCheck) fix(gpu bool) string {
	var ways []string
	train := d.config.GetTrain()
	if d.config.GetLora() == nil {
		ways = append(ways, "train adapters (`[lora]`)")
	}
	if d.config.GetModel().GetDtype() == "float32" {
		ways = append(ways, "`model.dtype = \"bfloat16\"`")
	}
	if train.GetOptimizer() != "adamw_8bit" {
		ways = append(ways, "`train.optimizer = \"adamw_8bit\"`")
	}
	if workers := d.config.GetEngine().GetWorkers(); workers > 1 {
		ways = append(ways, fmt.Sprintf("fewer than %d `engine.workers`", workers))
	}
	if gpu {
		ways = append(ways, "more `train.ranks`, each on its own GPU")
	}
	ways = append(ways, "a smaller model")
	return "choose " + strings.Join(ways, ", or ") + "; `rollout plan --explain-memory --gpus COUNTxSIZE` shows each part for another host"
}
