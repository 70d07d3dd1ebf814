package plan

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/problem"
	"github.com/rollout-rl/rollout/libs/exit"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// memoryFlags ask for the predicted memory instead of a plan.
type memoryFlags struct {
	explain      bool
	gpus, memory string
}

func (f *memoryFlags) addTo(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.explain, "explain-memory", false, "show the predicted memory of each process, and write no plan")
	cmd.Flags().StringVar(&f.gpus, "gpus", "", "the same for a host with `COUNTxSIZE` of GPUs, such as 8x80GB; 0: none")
	cmd.Flags().StringVar(&f.memory, "memory", "", "the same for a host with this `SIZE` of memory, such as 64GB")
}

// host is the host of the flags; nil for the real one.
func (f *memoryFlags) host() (*planv1.AssumedHost, error) {
	if f.gpus == "" && f.memory == "" {
		return nil, nil
	}
	host := &planv1.AssumedHost{}
	if f.memory != "" {
		bytes, err := humanize.ParseBytes(f.memory)
		if err != nil || bytes == 0 {
			return nil, exit.New(exit.Usage, "write a number with a unit, such as 64GB or 512GiB", "--memory %q is not a size", f.memory)
		}
		host.MemoryBytes = bytes
	}
	if f.gpus == "" || f.gpus == "0" {
		return host, nil
	}
	count, size, found := strings.Cut(f.gpus, "x")
	if !found {
		count, size = "1", f.gpus
	}
	n, err := strconv.ParseUint(count, 10, 16)
	bytes, sizeErr := humanize.ParseBytes(size)
	if err != nil || n == 0 || n > 1024 || sizeErr != nil || bytes == 0 {
		return nil, exit.New(exit.Usage, "write COUNTxSIZE, such as 8x80GB; at most 1024", "--gpus %q is not a number of GPUs with their memory", f.gpus)
	}
	host.GpuBytes = slices.Repeat([]uint64{bytes}, int(n))
	return host, nil
}

// explainMemory prints what the run of a configuration would need. It fails with the problems of
// the configuration, after the memory if that is known, and where the run does not fit the assumed
// host.
func explainMemory(ctx context.Context, env *cli.Env, c *client.Client, source *planv1.ConfigSource, host *planv1.AssumedHost) error {
	response, err := c.Planner.CreatePlan(ctx, &planv1.CreatePlanRequest{Source: source, Host: host})
	if err != nil {
		return err
	}
	report, problems := response.GetMemory(), response.GetProblems()
	if report == nil && len(problems) == 0 {
		return exit.New(exit.Data, "config.json must have its number of layers, its hidden size, and its heads", "the memory of this model can't be predicted")
	}
	if report == nil {
		return errors.Join(env.Message(response, func() string { return problem.Render(problems, env.Style()) }), problem.Exit(problems))
	}
	err = env.Message(report, func() string { return memoryText(env.Style(), report) + problem.Render(problems, env.Style()) })
	if len(problems) > 0 {
		return errors.Join(err, problem.Exit(problems))
	}
	if len(report.GetMisfits()) > 0 {
		return errors.Join(err, exit.Silent(exit.Data))
	}
	return err
}

func memoryText(s output.Style, report *planv1.MemoryReport) string {
	var text strings.Builder
	for _, p := range report.GetProcesses() {
		text.WriteString(processText(s, p))
	}
	fmt.Fprintf(&text, "%s of tensors all the time, at most %s", output.Bytes(report.GetHeldBytes()), output.Bytes(report.GetPeakBytes()))
	switch gpus := report.GetGpuBytes(); {
	case len(gpus) > 0:
		fmt.Fprintf(&text, "; GPUs of the host: %s", gpusText(gpus))
	case report.GetHostBytes() > 0:
		fmt.Fprintf(&text, "; the host has %s", output.Bytes(report.GetHostBytes()))
	}
	text.WriteString("\n")
	for _, misfit := range report.GetMisfits() {
		fmt.Fprintf(&text, "%s %s\n", s.Red("does not fit:"), misfit)
	}
	return text.String()
}

func gpusText(gpus []uint64) string {
	var parts []string
	for _, bytes := range slices.Compact(slices.Sorted(slices.Values(gpus))) {
		n := 0
		for _, other := range gpus {
			if other == bytes {
				n++
			}
		}
		parts = append(parts, fmt.Sprintf("%d x %s", n, output.Bytes(bytes)))
	}
	return strings.Join(parts, ", ")
}

func processText(s output.Style, p *planv1.ProcessMemory) string {
	var table output.Table
	var always, most usage
	row := func(group string, part *planv1.MemoryPart) {
		where := ""
		if part.GetOnHost() && p.GetDevice() != "cpu" {
			where = "host memory: "
		}
		table.Row("  "+group, part.GetName(), output.Bytes(part.GetBytes()), s.Dim(where+part.GetNote()))
	}
	for i, part := range p.GetHeld() {
		always.add(p, part)
		row(map[bool]string{true: "always"}[i == 0], part)
	}
	for _, phase := range p.GetPhases() {
		total := always
		for i, part := range phase.GetParts() {
			total.add(p, part)
			row(map[bool]string{true: phase.GetName()}[i == 0], part)
		}
		most = usage{max(most.device, total.device), max(most.host, total.host)}
	}
	most = usage{max(most.device, always.device), max(most.host, always.host)}
	title := fmt.Sprintf("%s on %s", p.GetKind(), p.GetDevice())
	if p.GetCount() > 1 {
		title = fmt.Sprintf("%d x %s, each", p.GetCount(), title)
	}
	text := fmt.Sprintf("%s always, at most %s", output.Bytes(always.device), output.Bytes(most.device))
	if p.GetDevice() != "cpu" {
		text += fmt.Sprintf("; in host memory %s, at most %s", output.Bytes(always.host), output.Bytes(most.host))
	}
	return fmt.Sprintf("%s: %s\n%s", s.Bold(title), text, table.String())
}

// usage is memory in bytes. On a CPU all of it is that of the device.
type usage struct{ device, host uint64 }

func (u *usage) add(p *planv1.ProcessMemory, part *planv1.MemoryPart) {
	if part.GetOnHost() && p.GetDevice() != "cpu" {
		u.host += part.GetBytes()
	} else {
		u.device += part.GetBytes()
	}
}
