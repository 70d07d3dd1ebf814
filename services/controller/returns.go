package controller

import (
	"fmt"

	"github.com/rollout-rl/rollout/libs/suite"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// returns are the metrics of the episodes of a policy that acts in environments: the mean return
// with its standard error and its interval of 95 %, and means of the metrics of episodes, such as
// their steps. Infrastructure failures are counted separately, never as a return of 0.
func returns(samples []*inferencev1.EvalSample) map[string]float64 {
	out := map[string]float64{"eval/episodes": float64(len(samples)), "eval/failed": 0}
	var rows []suite.Row
	sums, counts := map[string]float64{}, map[string]float64{}
	for _, s := range samples {
		if !scored(s) {
			out["eval/failed"]++
			continue
		}
		rows = append(rows, suite.Row{Row: int(s.GetRow()), Scores: []float64{s.GetReward()}})
		for name, value := range s.GetMetrics() {
			sums["eval/"+name] += value
			counts["eval/"+name]++
		}
	}
	for name, sum := range sums {
		out[name] = sum / counts[name]
	}
	value, ok := suite.Metric{Kind: suite.Mean}.Compute(rows, 0)
	if !ok {
		return out
	}
	out["eval/return"] = value.Value
	if value.Stderr != nil {
		out["eval/return_stderr"] = *value.Stderr
	}
	if value.Low != nil && value.High != nil {
		out["eval/return_low"], out["eval/return_high"] = *value.Low, *value.High
	}
	return out
}

// returnText is the mean return for people; ok: there is one.
func returnText(means map[string]float64) (text string, ok bool) {
	mean, ok := means["eval/return"]
	if !ok {
		return "", false
	}
	text = fmt.Sprintf("return %.3f", mean)
	if low, found := means["eval/return_low"]; found {
		text += fmt.Sprintf(" (%.3f to %.3f)", low, means["eval/return_high"])
	}
	return fmt.Sprintf("%s over %.0f episodes", text, means["eval/episodes"]-means["eval/failed"]), true
}
