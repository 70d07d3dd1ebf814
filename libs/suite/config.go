package suite

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/algorithm"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Names returns the suites of a configuration, sorted.
func Names(config *configv1.RunConfig) []string {
	return slices.Sorted(maps.Keys(config.GetEval().GetSuites()))
}

// Kinds of suites whose tasks are those of a library.
const (
	InspectAI = "inspect_ai"
	LMEval    = "lm_eval"
)

// OfLibrary reports whether the tasks of a suite are those of a library.
func OfLibrary(s *configv1.EvalSuiteConfig) bool {
	return s.GetKind() == InspectAI || s.GetKind() == LMEval
}

// InRun returns the suites that the evaluations of a run evaluate, sorted: none where evaluations
// compute a loss, without sampling.
func InRun(config *configv1.RunConfig) []string {
	if config.GetEval().GetEverySteps() == 0 || algorithm.TeachesHeldOut(config) {
		return nil
	}
	return Names(config)
}

// MetricsOf returns the metrics of a suite: without a list, the mean.
func MetricsOf(s *configv1.EvalSuiteConfig) []string {
	if len(s.GetMetrics()) == 0 {
		return []string{Mean}
	}
	return s.GetMetrics()
}

// Temperature returns that of the samples of a suite.
func Temperature(s *configv1.EvalSuiteConfig) float64 {
	switch {
	case s.Temperature != nil:
		return s.GetTemperature()
	case s.GetSamples() > 1:
		return 1
	}
	return 0
}

// Config returns a configuration whose evaluation is one of its suites: with the data, the
// sampling, and the scoring of the suite.
func Config(given *configv1.RunConfig, name string) *configv1.RunConfig {
	s, out := given.GetEval().GetSuites()[name], proto.CloneOf(given)
	if out.Sampling == nil {
		out.Sampling = &configv1.SamplingConfig{}
	}
	if out.Data == nil {
		out.Data = &configv1.DataConfig{}
	}
	out.Sampling.GroupSize = proto.Uint32(max(1, s.GetSamples()))
	out.Sampling.Temperature = proto.Float64(Temperature(s))
	if s.MaxTokens != nil {
		out.Sampling.MaxTokens = s.MaxTokens
	}
	if s.Seed != nil {
		out.Seed = s.Seed
	}
	if s.Data != nil {
		out.Data.Eval, out.Data.EvalSubset = s.Data, nil
	}
	switch {
	case s.Reward != nil && s.Environment == nil && algorithm.EnvironmentRewards(given):
		out.Environment = nil
	case s.Environment != nil:
		out.Environment = s.Environment
	}
	if s.Reward != nil {
		out.Reward = s.Reward
	} else if algorithm.EnvironmentRewards(out) {
		out.Reward = nil
	}
	out.Eval.Suites = nil
	return out
}
