package evaluation

import (
	"fmt"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/suite"
)

// Comparison compares two models by the suites that both results have.
type Comparison struct {
	A      string         `json:"a"` // model
	B      string         `json:"b"`
	Suites []ComparedRows `json:"suites"`
}

// ComparedRows is a suite of a comparison.
type ComparedRows struct {
	Name    string             `json:"name"`
	Metrics []suite.Difference `json:"metrics"`
}

// Compare compares two results. Suites with the same name must have the same rows.
func Compare(a, b *Result) (*Comparison, error) {
	c := &Comparison{A: a.Model, B: b.Model, Suites: []ComparedRows{}}
	for _, first := range a.Suites {
		second := b.suite(first.Name)
		if second == nil {
			continue
		}
		if first.DataDigest != second.DataDigest {
			return nil, refused("EVAL_ROWS_DIFFER", "evaluate both models with the same data and limit",
				"the suite %s has different rows: %s of %s (%s), and %s of %s (%s)", first.Name, output.Count(first.Rows), first.Data,
				output.Short(first.DataDigest), output.Count(second.Rows), second.Data, output.Short(second.DataDigest))
		}
		if first.PassScore != second.PassScore {
			return nil, refused("EVAL_PASS_SCORES_DIFFER", "evaluate both models with the same `pass_score`",
				"samples of the suite %s pass with %s in one result and with %s in the other", first.Name, output.Number(first.PassScore), output.Number(second.PassScore))
		}
		one := ComparedRows{Name: first.Name, Metrics: []suite.Difference{}}
		if first.Kind != "" { // the metrics are the library's: what can be compared row by row is the main score
			one.Metrics = append(one.Metrics, first.compare(second, suite.Value{Metric: suite.Mean})...)
			c.Suites = append(c.Suites, one)
			continue
		}
		for _, value := range first.Metrics {
			if second.has(value) {
				one.Metrics = append(one.Metrics, first.compare(second, value)...)
			}
		}
		c.Suites = append(c.Suites, one)
	}
	if len(c.Suites) == 0 {
		return nil, refused("EVAL_NO_COMMON_SUITE", "evaluate both models with the same suites",
			"the results have no suite in common: one has %s, the other %s", a.names(), b.names())
	}
	return c, nil
}

func refused(reason, fix, text string, values ...any) error {
	return &exit.Error{Code: exit.Data, Reason: reason, Fix: fix, Err: fmt.Errorf(text, values...)}
}

func (r *Result) names() string {
	var all []string
	for _, s := range r.Suites {
		all = append(all, s.Name)
	}
	return strings.Join(all, ", ")
}

func (s *Suite) has(value suite.Value) bool {
	return slices.ContainsFunc(s.Metrics, func(v suite.Value) bool { return v.Metric == value.Metric && v.Part == value.Part })
}

// compare returns the difference in a metric; nothing if no row has it with both.
func (s *Suite) compare(other *Suite, value suite.Value) []suite.Difference {
	metric, a, b := suite.Metric{Kind: suite.Mean}, ofPart(s.rows, value.Metric), ofPart(other.rows, value.Metric)
	if !value.Part {
		var err error
		if metric, err = suite.Parse(value.Metric); err != nil {
			return nil // of another version
		}
		a, b = scored(s.rows), scored(other.rows)
	}
	d, ok := metric.Compare(a, b, s.PassScore)
	if !ok {
		return nil
	}
	d.Metric, d.Part = value.Metric, value.Part
	return []suite.Difference{d}
}
