package export

import (
	"bytes"
	_ "embed" // card.md
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/template"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/report"
	"github.com/rollout-rl/rollout/cmd/internal/setting"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/trainstate"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

//go:embed card.md
var cardText string

var cardTemplate = template.Must(template.New("card").Parse(cardText))

// measure is a metric in the card.
type measure struct{ Name, Before, After string }

// cardOf returns the model card of a part of a snapshot.
func cardOf(snapshot *snapshotv1.Snapshot, data *report.Data, part string) ([]byte, error) {
	run := data.Run.Status.GetRun()
	config := run.GetPlan().GetConfig()
	values := map[string]any{
		"Library": "transformers", "Pipeline": "text-generation", "Algorithm": algorithm.Name(config), "Title": algorithm.Title(config),
		"Name": run.GetName(), "Run": run.GetRunId(), "Snapshot": snapshot.GetSnapshotId(), "Part": part, "Plan": snapshot.GetPlanId(),
		"Digest": snapshot.GetWeightsDigest(), "Step": snapshot.GetStep(), "Total": run.GetTotalSteps(), "Settings": setting.TOML(config),
	}
	if part == "adapter" {
		values["Library"] = "peft"
	}
	if !algorithm.Generates(config) {
		values["Pipeline"] = "text-classification"
	}
	if slices.ContainsFunc(run.GetPlan().GetInputs(), func(in *planv1.Input) bool {
		return in.GetRole() == planv1.InputRole_INPUT_ROLE_MODEL && in.GetRevision() != ""
	}) { // a model of the hub
		values["Base"], _, _ = strings.Cut(config.GetModel().GetPath(), "@")
	}
	evaluations, step := evaluated(data, snapshot.GetStep())
	values["Evaluations"], values["EvalStep"], values["Metrics"] = evaluations, step, trained(data, snapshot.GetStep())
	var b bytes.Buffer
	if err := cardTemplate.Execute(&b, values); err != nil {
		return nil, fmt.Errorf("write the model card: %w", err)
	}
	return b.Bytes(), nil
}

// evaluated returns the metrics of the first evaluation and of the last one up to a step.
func evaluated(data *report.Data, step uint64) (measures []measure, last uint64) {
	evals := data.Run.Evals
	for len(evals) > 0 && evals[len(evals)-1].Step > step {
		evals = evals[:len(evals)-1]
	}
	if len(evals) == 0 {
		return nil, 0
	}
	first, newest := evals[0], evals[len(evals)-1]
	for _, name := range slices.Sorted(maps.Keys(newest.Metrics)) {
		before := "-"
		if v, ok := first.Metrics[name]; ok && first.Step < newest.Step {
			before = output.Number(v)
		}
		measures = append(measures, measure{strings.TrimPrefix(name, "eval/"), before, output.Number(newest.Metrics[name])})
	}
	return measures, newest.Step
}

// trained returns the metrics of a training step.
func trained(data *report.Data, step uint64) (measures []measure) {
	for _, name := range slices.Sorted(maps.Keys(data.Series)) {
		if strings.HasPrefix(name, "eval/") || strings.HasPrefix(name, "time/") {
			continue
		}
		for _, p := range data.Series[name] {
			if p.Step == float64(step) {
				measures = append(measures, measure{Name: name, After: output.Number(p.Value)})
			}
		}
	}
	return measures
}

// bytesOf returns the size of a part of a snapshot.
func bytesOf(snapshot *snapshotv1.Snapshot, part string) (n uint64) {
	if part == trainstate.Weights && trainstate.Adapted(snapshot) {
		part = trainstate.Base // merged weights have about the size of the model
	}
	for _, file := range trainstate.Only(snapshot, part).GetFiles() {
		n += file.GetBytes()
	}
	return n
}
