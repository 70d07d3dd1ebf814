package evaluation

import (
	_ "embed" // page.html
	"fmt"
	"html/template"
	"io"

	"github.com/rollout-rl/rollout/cmd/internal/inference"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/report"
	"github.com/rollout-rl/rollout/libs/suite"
)

//go:embed page.html
var pageText string

var page = template.Must(template.New("page").Parse(pageText))

type (
	pageSuite struct {
		Name    string
		Facts   []fact
		Metrics []pageMetric
		Answers []answer
	}
	fact       struct{ Name, Value string }
	pageMetric struct {
		Name, Value, Interval, Stderr, Rows string
		SVG                                 template.HTML
	}
	answer struct {
		Row                              int
		Prompt, Completion, Score, Class string
	}
)

// html writes the page, which loads nothing.
func (r *Result) html(w io.Writer) error {
	var suites []pageSuite
	for _, s := range r.Suites {
		one := pageSuite{Name: s.Name, Facts: s.facts(), Answers: s.answers()}
		for _, v := range s.Metrics {
			one.Metrics = append(one.Metrics, pageMetric{
				MetricName(v.Metric, v.Part), output.Number(v.Value), Interval(v), number(v.Stderr), output.Count(v.Rows), drawn(v),
			})
		}
		suites = append(suites, one)
	}
	if err := page.Execute(w, map[string]any{"Style": report.Style(), "Model": r.Model, "Digest": r.Digest, "Suites": suites}); err != nil {
		return fmt.Errorf("write the page: %w", err)
	}
	return nil
}

func (s *Suite) facts() []fact {
	facts := []fact{
		{"data", s.Data},
		{"rows", fmt.Sprintf("%s, %s samples, %s tokens", output.Count(s.Rows), output.Count(s.Samples), output.Count(s.Tokens))},
	}
	if s.Kind == "" {
		facts = append(facts, fact{"sampling", s.Sampling.String()})
	} else {
		facts[0].Name = "tasks"
		facts = append(facts, fact{"library", s.Kind + " " + s.Version})
	}
	if s.Dropped > 0 {
		facts = append(facts, fact{"dropped", output.Plural(s.Dropped, "row") + " that are too long"})
	}
	if failed := inference.Counts(s.Failures); failed != "" {
		facts = append(facts, fact{"failed", failed})
	}
	return facts
}

func (s *Suite) answers() (all []answer) {
	for _, l := range s.rows {
		for i, completion := range l.Completions {
			one := answer{Row: l.Row, Prompt: l.Prompt, Completion: completion, Score: "-"}
			if score := l.Scores[i]; score != nil {
				one.Score = output.Number(*score)
				if one.Class = "bad"; *score >= s.PassScore {
					one.Class = "good"
				}
			}
			all = append(all, one)
		}
	}
	return all
}

// MetricName is the name of a metric for people. part: it is a further number of the reward, whose
// name may be that of a metric.
func MetricName(name string, part bool) string {
	if part {
		return "reward/" + name
	}
	return name
}

// Interval returns the interval of a value as text.
func Interval(v suite.Value) string {
	if v.Low == nil || v.High == nil {
		return "-"
	}
	return fmt.Sprintf("%s to %s", output.Number(*v.Low), output.Number(*v.High))
}

func number(v *float64) string {
	if v == nil {
		return "-"
	}
	return output.Number(*v)
}

// drawn draws an interval within 0 to 1; nothing for one outside of it, and without one.
func drawn(v suite.Value) template.HTML {
	const width = 200
	if v.Low == nil || v.High == nil || *v.Low < 0 || *v.High > 1 {
		return ""
	}
	return template.HTML(fmt.Sprintf( //nolint:gosec // numbers
		`<svg viewBox="0 0 %d 12" style="width:%dpx"><path class="raw" d="M0,6L%d,6"/><path class="a" d="M%.1f,6L%.1f,6"/><circle class="a" cx="%.1f" cy="6" r="4"/></svg>`,
		width, width, width, *v.Low*width, *v.High*width, v.Value*width))
}
