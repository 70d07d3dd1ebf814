package report

import (
	"cmp"
	_ "embed" // compare.html
	"fmt"
	"html/template"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/guptarohit/asciigraph"
	"gonum.org/v1/plot/vg"

	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/setting"
	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Comparison is the content of a report on several runs.
type Comparison struct {
	Runs   []*Data
	Labels []string // one per run: its name, or its id where names are equal
	Metric string   // of the curves
}

// Compare compares runs by a metric; "" is the reward, the loss, or the first metric that all runs
// have.
func Compare(runs []*Data, metric string) (*Comparison, error) {
	c := &Comparison{Runs: runs, Metric: metric}
	byName := map[string]int{}
	for _, d := range runs {
		byName[d.run().GetName()]++
	}
	for _, d := range runs {
		label := d.run().GetName()
		if byName[label] > 1 {
			label = d.run().GetRunId()
		}
		if slices.Contains(c.Labels, label) {
			return nil, exit.New(exit.Usage, "name different runs", "%s is named twice", label)
		}
		c.Labels = append(c.Labels, label)
	}
	if metric == "" {
		c.Metric = c.mainMetric()
		return c, nil
	}
	known := map[string]bool{}
	for _, d := range runs {
		for name := range d.Series {
			known[name] = true
		}
	}
	if !known[metric] {
		return nil, exit.New(exit.Usage, "choose one of "+strings.Join(slices.Sorted(maps.Keys(known)), ", "), "no run has the metric %q", metric)
	}
	return c, nil
}

// mainMetric returns the metric whose curves say most: one that all runs have.
func (c *Comparison) mainMetric() string {
	first, _ := c.Runs[0].curve()
	candidates := append([]string{first, "reward/mean", "loss"}, live.EvalNames...)
	for _, name := range candidates {
		if !slices.ContainsFunc(c.Runs, func(d *Data) bool { return len(d.Series[name]) == 0 }) {
			return name
		}
	}
	return first
}

// Difference is a configuration key that differs between the runs. Values has one per run; "" where
// the configuration lacks the key.
type Difference struct {
	Key    string   `json:"key"`
	Values []string `json:"values"`
}

// Differences returns the keys with different values, defaults included, and the inputs with
// different content.
func (c *Comparison) Differences() []Difference {
	var all []map[string]string
	keys := map[string]bool{}
	for _, d := range c.Runs {
		flat := settingsOf(d.run().GetPlan().GetConfig())
		for _, in := range d.run().GetPlan().GetInputs() {
			role := strings.ToLower(strings.TrimPrefix(in.GetRole().String(), "INPUT_ROLE_"))
			flat["content of "+role+" "+in.GetPath()] = output.Short(in.GetDigest())
		}
		for key := range flat {
			keys[key] = true
		}
		all = append(all, flat)
	}
	differences := []Difference{}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		difference := Difference{Key: key}
		for _, flat := range all {
			difference.Values = append(difference.Values, flat[key])
		}
		if slices.ContainsFunc(difference.Values, func(v string) bool { return v != difference.Values[0] }) {
			differences = append(differences, difference)
		}
	}
	return differences
}

// settingsOf returns the settings of a run. The keys of an algorithm are without its name, so that
// those of another algorithm are compared with them.
func settingsOf(config *configv1.RunConfig) map[string]string {
	settings, name := map[string]string{}, algorithm.Name(config)
	for key, value := range setting.Of(config) {
		switch own, found := strings.CutPrefix(key, "algorithm."+name+"."); {
		case found:
			settings["algorithm."+own] = value
		case key != "algorithm."+name:
			settings[key] = value
		}
	}
	settings["algorithm"] = name
	return settings
}

// Evaluation is one metric of the evaluations. Ranges has one per run; nil where a run lacks it.
type Evaluation struct {
	Metric string   `json:"metric"`
	Ranges []*Range `json:"runs"`
}

// Range is the first and the last value of a metric.
type Range struct {
	First Point `json:"first"`
	Last  Point `json:"last"`
}

// Evaluations returns the metrics on held-out rows.
func (c *Comparison) Evaluations() []Evaluation {
	names := map[string]bool{}
	for _, d := range c.Runs {
		for _, name := range d.evalNames() {
			names[name] = true
		}
	}
	evaluations := []Evaluation{}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		evaluation := Evaluation{Metric: name}
		for _, d := range c.Runs {
			var r *Range
			if points := d.Series[name].finite(); len(points) > 0 {
				r = &Range{points[0], points[len(points)-1]}
			}
			evaluation.Ranges = append(evaluation.Ranges, r)
		}
		evaluations = append(evaluations, evaluation)
	}
	return evaluations
}

// Throughput is the speed of a run: means over its steps; 0 where a run has no step.
type Throughput struct {
	Samples float64 `json:"samples_per_second"`
	Tokens  float64 `json:"tokens_per_second"`
	Step    float64 `json:"seconds_per_step"`
	Seconds float64 `json:"seconds"` // from its creation to its end; 0: it has not ended
}

// Throughput returns the speed of each run.
func (c *Comparison) Throughput() (out []Throughput) {
	for _, d := range c.Runs {
		t := Throughput{Samples: d.Series["samples_per_second"].mean(), Tokens: d.Series["tokens_per_second"].mean(), Step: d.Series["time/step"].mean()}
		if d.run().GetEndTime() != nil {
			t.Seconds = d.run().GetEndTime().AsTime().Sub(d.run().GetCreateTime().AsTime()).Seconds()
		}
		out = append(out, t)
	}
	return out
}

func (d *Data) run() *runv1.Run { return d.Run.Status.GetRun() }

// mean returns the mean of the finite values; 0 without any.
func (s Series) mean() float64 {
	sum, finite := 0.0, s.finite()
	for _, p := range finite {
		sum += p.Value / float64(len(finite))
	}
	return sum
}

// Curve returns the finite points of the metric of one run.
func (c *Comparison) Curve(run int) Series {
	points := c.Runs[run].Series[c.Metric].finite()
	if points == nil {
		points = Series{}
	}
	return points
}

// Chart draws the curves with characters: as colored lines, or with the number of the run.
func (c *Comparison) Chart(width, height int, color bool) string {
	first, last := math.Inf(1), math.Inf(-1)
	for i := range c.Runs {
		for _, p := range c.Curve(i) {
			first, last = min(first, p.Step), max(last, p.Step)
		}
	}
	if first >= last {
		return "" // a line needs two steps
	}
	var lines [][]float64
	var characters []asciigraph.CharSet
	var colors []asciigraph.AnsiColor
	for i := range c.Runs {
		lines = append(lines, c.Curve(i).smooth().sample(first, last, width))
		characters = append(characters, asciigraph.CreateCharSet(fmt.Sprint((i+1)%10)))
		colors = append(colors, terminalColors[i%len(terminalColors)])
	}
	options := []asciigraph.Option{
		asciigraph.Height(height), asciigraph.XAxisRange(first, last), asciigraph.XAxisTickCount(5),
		asciigraph.XAxisValueFormatter(func(v float64) string { return output.Count(v) }),
		asciigraph.YAxisValueFormatter(output.Number),
	}
	if color {
		options = append(options, asciigraph.SeriesColors(colors...))
	} else {
		options = append(options, asciigraph.SeriesChars(characters...))
	}
	return asciigraph.PlotMany(lines, options...) + "\n"
}

// terminalColors are the colors of the runs on a terminal.
var terminalColors = []asciigraph.AnsiColor{asciigraph.Blue, asciigraph.Orange, asciigraph.Green, asciigraph.Magenta, asciigraph.Red, asciigraph.Teal}

// Legend returns the label of a run in its color, or with its number.
func (c *Comparison) Legend(run int, color bool) string {
	if !color {
		return fmt.Sprintf("%d %s", run+1, c.Labels[run])
	}
	return terminalColors[run%len(terminalColors)].String() + "━━ " + c.Labels[run] + "\x1b[0m"
}

// sample returns the value at n steps from first to last, interpolated; NaN outside of the series.
func (s Series) sample(first, last float64, n int) []float64 {
	out := make([]float64, n)
	for i := range out {
		step := first + (last-first)*float64(i)/float64(n-1)
		at, found := slices.BinarySearchFunc(s, step, func(p Point, step float64) int { return cmp.Compare(p.Step, step) })
		switch {
		case found:
			out[i] = s[at].Value
		case at == 0 || at == len(s):
			out[i] = math.NaN()
		default:
			before, after := s[at-1], s[at]
			out[i] = before.Value + (after.Value-before.Value)*(step-before.Step)/(after.Step-before.Step)
		}
	}
	return out
}

// PNG draws the curves into one picture.
func (c *Comparison) PNG(w io.Writer) error {
	p := newPlot(strings.Join(c.Labels, ", "), c.Metric)
	for i := range c.Runs {
		if err := addLine(p, c.Curve(i).smooth(), palette[i%len(palette)], vg.Points(2), c.Labels[i]); err != nil {
			return err
		}
	}
	flatAxis(p, c.Curve(0))
	p.Legend.Top = true
	p.Y.Max += 0.06 * float64(len(c.Runs)+1) * (p.Y.Max - p.Y.Min) // room for the legend
	return writePNG(p, w)
}

//go:embed compare.html
var comparePageText string

var comparePage = template.Must(template.New("compare").Parse(comparePageText))

// legend is a run in the legend of the page.
type legend struct{ Label, Class, ID, State string }

// HTML writes a page with the curves of all metrics that two runs have, the different settings, the
// evaluations and the speed.
func (c *Comparison) HTML(w io.Writer) error {
	var legends []legend
	for i, d := range c.Runs {
		legends = append(legends, legend{c.Labels[i], class(i), d.run().GetRunId(), live.State(d.run().GetState())})
	}
	err := comparePage.Execute(w, map[string]any{
		"Style": Style(), "Title": strings.Join(c.Labels, ", "), "Legends": legends, "Panels": c.panels(), "Differences": c.Differences(),
		"Evaluations": c.EvaluationRows(), "Speed": c.ThroughputRows(),
	})
	if err != nil {
		return fmt.Errorf("write the page: %w", err)
	}
	return nil
}

// class is the class of the lines of a run in the style sheet.
func class(run int) string { return string(rune('a' + run%len(palette))) }

// panels has the chart of the main metric first.
func (c *Comparison) panels() []panel {
	names := []string{c.Metric}
	add := func(name string) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, e := range c.Evaluations() {
		add(e.Metric)
	}
	for _, p := range panels {
		for _, name := range p.metrics {
			add(name)
		}
	}
	var out []panel
	for _, name := range names {
		var lines []line
		for i, d := range c.Runs {
			if points := d.Series[name]; len(points.finite()) > 0 {
				lines = append(lines, line{name: name, class: class(i), points: points.finite().smooth(), dots: strings.HasPrefix(name, "eval/")})
			}
		}
		if svg := chart(lines...); svg != "" && (len(lines) > 1 || name == c.Metric) {
			out = append(out, panel{Title: name, SVG: svg})
		}
	}
	return out
}

// Row is a line of a table: a name and a cell per run.
type Row struct {
	Name  string
	Cells []string
}

// EvaluationRows returns the evaluations as text: before, after, and at which step.
func (c *Comparison) EvaluationRows() (rows []Row) {
	for _, e := range c.Evaluations() {
		row := Row{Name: strings.TrimPrefix(e.Metric, "eval/")}
		for _, r := range e.Ranges {
			cell := "-"
			if r != nil {
				cell = fmt.Sprintf("%s -> %s (step %s)", output.Number(r.First.Value), output.Number(r.Last.Value), output.Count(r.Last.Step))
			}
			row.Cells = append(row.Cells, cell)
		}
		rows = append(rows, row)
	}
	return rows
}

// ThroughputRows returns the progress and the speed of the runs as text.
func (c *Comparison) ThroughputRows() []Row {
	rows := []Row{{Name: "steps"}, {Name: "samples/s"}, {Name: "tokens/s"}, {Name: "s per step"}, {Name: "took"}}
	number := func(v float64) string {
		if v == 0 {
			return "-"
		}
		return output.Number(v)
	}
	for i, t := range c.Throughput() {
		run, took := c.Runs[i].run(), "-"
		if t.Seconds > 0 {
			took = output.Duration(time.Duration(t.Seconds * float64(time.Second)).Round(100 * time.Millisecond))
		}
		for j, cell := range []string{
			output.Count(run.GetStep()) + " of " + output.Count(run.GetTotalSteps()), number(t.Samples), number(t.Tokens), number(t.Step), took,
		} {
			rows[j].Cells = append(rows[j].Cells, cell)
		}
	}
	return rows
}
