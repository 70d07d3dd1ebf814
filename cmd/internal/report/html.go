package report

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/refusal"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

//go:embed page.html
var pageText string

//go:embed style.css
var style string

// Style is the style sheet of the pages.
func Style() template.CSS { return template.CSS(style) } //nolint:gosec // our own style sheet

var page = template.Must(template.New("page").Funcs(template.FuncMap{"number": output.Number, "signed": signed}).Parse(pageText))

const answersShown = 16

// panel is a chart with its heading.
type panel struct {
	Title, Note string
	SVG         template.HTML
}

type fact struct{ Name, Value string }

type measure struct {
	Name, Before, After, Change string
	Better                      bool
}

type answer struct {
	Prompt, Before, After             string
	BeforeReward, AfterReward         string
	BeforeGood, AfterGood, Comparable bool
}

// signed formats an advantage.
func signed(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%+.3f", *v)
}

// panels are the charts in order: title, metrics, explanation.
var panels = []struct {
	title, note string
	metrics     []string
}{
	{"loss", "", []string{"loss"}},
	{"preference accuracy", "share of pairs whose chosen completion is above", []string{"rewards/accuracy"}},
	{"preference margin", "reward of the chosen less that of the rejected", []string{"rewards/margin"}},
	{"entropy", "of the policy, per token", []string{"entropy"}},
	{"KL divergence", "engine and learner should agree: mismatch near 0", []string{"mismatch/kl", "kl/reference"}},
	{"largest mismatch", "probability ratio of learner and engine of the worst token; 1 if they agree", []string{"mismatch/max_ratio"}},
	{"clip fraction", "share of tokens whose ratio was clipped", []string{"clip_fraction"}},
	{"gradient norm", "before clipping", []string{"grad_norm"}},
	{"learning rate", "", []string{"learning_rate"}},
	{"length", "tokens a completion", []string{"length/mean"}},
	{"groups without advantage", "all rewards equal: nothing to learn from", []string{"zero_advantage_groups"}},
	{"samples a second", "", []string{"samples_per_second"}},
	{"tokens a second", "", []string{"tokens_per_second"}},
	{"seconds a step", "", []string{"time/step", "time/lease", "time/train", "time/deliver"}},
}

// HTML writes the page.
func (d *Data) HTML(w io.Writer) error {
	run := d.Run.Status.GetRun()
	err := page.Execute(w, map[string]any{
		"Style": Style(),
		"Name":  run.GetName(), "State": live.State(run.GetState()), "Succeeded": run.GetReason() == "" || run.GetReason() == refusal.StoppedByGate,
		"Notes": d.notes(), "Facts": d.facts(), "Panels": d.panels(), "Measures": d.measures(), "Answers": d.answers(), "Kept": d.Kept, "Episodes": episodes(d.Kept),
	})
	if err != nil {
		return fmt.Errorf("write the page: %w", err)
	}
	return nil
}

// notes describes how a run ended that did not succeed, and its warnings.
func (d *Data) notes() []string {
	run := d.Run.Status.GetRun()
	var lines []string
	switch run.GetState() {
	case runv1.RunState_RUN_STATE_SUCCEEDED:
		if run.GetReason() == refusal.StoppedByGate {
			lines = append(lines, "The run was stopped by "+run.GetMessage())
		}
	case runv1.RunState_RUN_STATE_PAUSED:
		if run.GetReason() == refusal.PausedByGate {
			lines = append(lines, "The run was paused by "+run.GetMessage())
		}
	case runv1.RunState_RUN_STATE_FAILED:
		lines = append(lines, "The run failed: "+strings.TrimLeft(run.GetReason()+": "+run.GetMessage(), ": "))
	case runv1.RunState_RUN_STATE_CANCELLED, runv1.RunState_RUN_STATE_INTERRUPTED:
		text := "The run was " + strings.ToLower(live.State(run.GetState()))
		if run.GetMessage() != "" {
			text += ": " + run.GetMessage()
		}
		lines = append(lines, text)
	}
	if len(d.Series["loss"])+len(d.Series["reward/mean"]) == 0 {
		text := "No step was committed, so there is nothing to draw."
		if waiting := d.Run.Status.GetWaitingFor(); waiting != "" {
			text += " It waits for " + waiting + "."
		}
		lines = append(lines, text)
	}
	for _, w := range d.Run.Warnings {
		text := w.GetService() + ": " + w.GetMessage()
		if w.Count > 1 {
			text = fmt.Sprintf("%s times: %s", output.Count(w.Count), text)
		}
		lines = append(lines, text)
	}
	return lines
}

func (d *Data) facts() []fact {
	run := d.Run.Status.GetRun()
	config := run.GetPlan().GetConfig()
	work := algorithm.Title(config)
	if !algorithm.FromData(config) {
		work += fmt.Sprintf(", %d samples a prompt", config.GetSampling().GetGroupSize())
	}
	facts := []fact{
		{"run", run.GetRunId()},
		{"steps", fmt.Sprintf("%s of %s", output.Count(run.GetStep()), output.Count(run.GetTotalSteps()))},
		{"algorithm", work},
		{"model", config.GetModel().GetPath()},
		{"data", config.GetData().GetTrain()},
		{"mode", config.GetMode()},
		{"seed", fmt.Sprint(config.GetSeed())},
		{"learning rate", output.Number(config.GetTrain().GetLearningRate())},
		{"plan", run.GetPlan().GetPlanId()},
		{"weights", run.GetWeightsDigest()},
	}
	if run.GetEndTime() != nil {
		facts = append(facts, fact{"took", output.Duration(run.GetEndTime().AsTime().Sub(run.GetCreateTime().AsTime()).Round(time.Second))})
	}
	return slices.DeleteFunc(facts, func(f fact) bool { return f.Value == "" })
}

func (d *Data) panels() []panel {
	var out []panel
	name, points := d.curve()
	main := []line{{name: name, class: "raw", points: points}, {name: name, class: "a", points: points.smooth()}}
	note := name + " while training"
	if evalName, evals := d.evalCurve(); len(evals) > 0 && (name != "loss" || evalName == "eval/loss") {
		main = append(main, line{name: evalName, class: "b", points: evals, dots: true})
		note += " (blue), " + evalName + " on held-out rows (orange)"
	}
	title := strings.TrimSuffix(name, "/mean")
	if svg := chart(main...); svg != "" {
		out = append(out, panel{title, note, svg})
	}
	for _, series := range d.evalNames() {
		if svg := chart(line{name: series, class: "b", points: d.Series[series], dots: true}); svg != "" {
			out = append(out, panel{series, "on held-out rows", svg})
		}
	}
	for _, p := range panels {
		var lines []line
		var names []string
		for i, metric := range p.metrics {
			if len(d.Series[metric]) > 0 && metric != name {
				lines = append(lines, line{name: metric, class: string(rune('a' + i)), points: d.Series[metric]})
				names = append(names, metric)
			}
		}
		note := p.note
		if len(names) > 1 {
			note = strings.Join(names, ", ")
		} else if len(lines) == 1 {
			if value, flat := lines[0].points.constant(); flat {
				note = strings.TrimPrefix(note+"; constant at "+output.Number(value), "; ")
			}
		}
		if svg := chart(lines...); svg != "" {
			out = append(out, panel{p.title, note, svg})
		}
	}
	return out
}

func (d *Data) evalNames() []string {
	var names []string
	for name := range d.Series {
		if live.IsEvalName(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func (d *Data) measures() []measure {
	evals := d.Run.Evals
	if len(evals) < 2 {
		return nil
	}
	var out []measure
	first, last := evals[0].Metrics, evals[len(evals)-1].Metrics
	for _, name := range d.evalNames() {
		before, ok := first[name]
		after, also := last[name]
		if ok && also {
			out = append(out, measure{name, output.Number(before), output.Number(after), fmt.Sprintf("%+.3f", after-before), after >= before})
		}
	}
	return out
}

func (d *Data) answers() []answer {
	var out []answer
	for _, pair := range d.Run.Pairs(answersShown) {
		out = append(out, answer{
			Prompt: pair.After.Question(), Before: pair.Before.Completion, After: pair.After.Completion,
			BeforeReward: pair.Before.Verdict(), AfterReward: pair.After.Verdict(),
			BeforeGood: pair.Before.Good(), AfterGood: pair.After.Good(), Comparable: len(d.Run.Evals) > 1,
		})
	}
	return out
}
