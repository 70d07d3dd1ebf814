package controller

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/suite"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// heldOut is the name of the held-out rows of a run among its suites.
const heldOut = ""

// answers are the samples of a suite, ordered by row.
type answers struct {
	suite   string // or heldOut
	samples []*inferencev1.EvalSample
}

// evaluatedSuites returns the suites of an evaluation, the held-out rows first.
func (s settings) evaluatedSuites() []string {
	names := suite.InRun(s.cfg)
	if s.cfg.GetData().GetEval() != "" || len(names) == 0 {
		names = append([]string{heldOut}, names...)
	}
	return names
}

// request asks a worker for the samples of a suite.
func (s settings) request(name string) *inferencev1.EvaluateRequest {
	request := &inferencev1.EvaluateRequest{RunId: s.runID, Suite: name}
	if name == heldOut {
		request.MaxPrompts, request.Temperature, request.Seed = s.cfg.GetEval().GetMaxPrompts(), s.cfg.GetEval().GetTemperature(), s.cfg.GetSeed()
		return request
	}
	one := s.cfg.GetEval().GetSuites()[name]
	request.MaxPrompts, request.Samples = uint32(min(one.GetLimit(), math.MaxUint32)), max(1, one.GetSamples())
	request.Temperature, request.Seed = suite.Temperature(one), s.cfg.GetSeed()
	if one.Seed != nil {
		request.Seed = one.GetSeed()
	}
	return request
}

func promptsOf(name string) string {
	if name == heldOut {
		return "the held-out prompts"
	}
	return "the prompts of the suite " + name
}

// suiteResult is the result of a suite in the event of an evaluation.
type suiteResult struct {
	Suite   string        `json:"suite"`
	Rows    int           `json:"rows"`
	Samples int           `json:"samples"`
	Failed  int           `json:"failed"` // samples without a score
	Metrics []suite.Value `json:"metrics"`
}

// measure computes the metrics of a suite, and the means of the further numbers of its reward.
// Samples that failed have no score.
func measure(config *configv1.RunConfig, a answers) suiteResult {
	one := config.GetEval().GetSuites()[a.suite]
	result := suiteResult{Suite: a.suite, Samples: len(a.samples), Metrics: []suite.Value{}}
	var rows []suite.Row
	parts := map[string][]suite.Row{}
	for _, s := range a.samples {
		row := suite.Row{Row: int(s.GetRow()), Cluster: s.GetCluster()}
		if len(rows) == 0 || rows[len(rows)-1].Row != row.Row {
			rows = append(rows, row)
		}
		if !scored(s) {
			result.Failed++
			continue
		}
		add(&rows[len(rows)-1], s.GetReward())
		for name, value := range s.GetMetrics() {
			if list := parts[name]; len(list) == 0 || list[len(list)-1].Row != row.Row {
				parts[name] = append(list, row)
			}
			add(&parts[name][len(parts[name])-1], value)
		}
	}
	result.Rows = len(rows)
	for _, text := range suite.MetricsOf(one) {
		metric, err := suite.Parse(text)
		if err != nil { // the planner refuses it
			continue
		}
		if value, ok := metric.Compute(rows, one.GetPassScore()); ok {
			result.Metrics = append(result.Metrics, value)
		}
	}
	named := len(result.Metrics)
	for name, list := range parts {
		if value, ok := (suite.Metric{Kind: suite.Mean}).Compute(list, one.GetPassScore()); ok {
			value.Metric, value.Part = name, true
			result.Metrics = append(result.Metrics, value)
		}
	}
	slices.SortFunc(result.Metrics[named:], func(a, b suite.Value) int { return strings.Compare(a.Metric, b.Metric) })
	return result
}

func add(row *suite.Row, score float64) { row.Scores = append(row.Scores, score) }

// means returns the metrics of a run that the result gives: `eval/SUITE/METRIC`, each with its
// standard error.
func (r suiteResult) means() map[string]float64 {
	prefix := "eval/" + r.Suite + "/"
	out := map[string]float64{prefix + "samples": float64(r.Samples), prefix + "failed": float64(r.Failed)}
	for _, value := range r.Metrics {
		out[prefix+value.Metric] = value.Value
		if value.Stderr != nil {
			out[prefix+value.Metric+"_stderr"] = *value.Stderr
		}
	}
	return out
}

// text is the result for people.
func (r suiteResult) text() string {
	if r.Failed == r.Samples {
		return fmt.Sprintf("suite %s: no sample was scored", r.Suite)
	}
	parts := []string{}
	for _, value := range r.Metrics {
		text := fmt.Sprintf("%s %.3f", value.Metric, value.Value)
		if value.Low != nil && value.High != nil {
			text += fmt.Sprintf(" (%.3f to %.3f)", *value.Low, *value.High)
		}
		parts = append(parts, text)
	}
	return fmt.Sprintf("suite %s: %s over %d rows", r.Suite, strings.Join(parts, ", "), r.Rows)
}
