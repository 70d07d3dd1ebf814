package report

import (
	"fmt"
	"html/template"
	"math"
	"strconv"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/output"
)

const (
	chartWidth  = 560.0
	chartHeight = 220.0
	leftMargin  = 56.0
	pad         = 14.0
	bottom      = 26.0
	maxPoints   = 600 // of a line; more than the pixels there are
)

// line is one line of a chart.
type line struct {
	name, class string
	points      Series
	dots        bool
}

// chart draws lines over the steps as SVG; the page's style sheet has the colors.
func chart(lines ...line) template.HTML {
	low, high, first, last := math.Inf(1), math.Inf(-1), math.Inf(1), math.Inf(-1)
	for i := range lines {
		lines[i].points = lines[i].points.thin()
		for _, p := range lines[i].points {
			low, high = min(low, p.Value), max(high, p.Value)
			first, last = min(first, p.Step), max(last, p.Step)
		}
	}
	if first > last {
		return ""
	}
	low, high = span(low, high)
	if last == first {
		last = first + 1
	}
	x := func(step float64) float64 {
		return leftMargin + (step-first)/(last-first)*(chartWidth-leftMargin-pad)
	}
	y := func(value float64) float64 {
		return chartHeight - bottom - (value-low)/(high-low)*(chartHeight-bottom-pad)
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg viewBox="0 0 %g %g" role="img">`, chartWidth, chartHeight)
	for _, tick := range ticks(low, high) {
		fmt.Fprintf(&b, `<line class="grid" x1="%g" x2="%g" y1="%.1f" y2="%.1f"/><text class="tick" x="%g" y="%.1f" text-anchor="end">%s</text>`,
			leftMargin, chartWidth-pad, y(tick), y(tick), leftMargin-6, y(tick)+4, tickText(tick))
	}
	for _, tick := range ticks(first, last) {
		if tick == math.Trunc(tick) {
			fmt.Fprintf(&b, `<text class="tick" x="%.1f" y="%g" text-anchor="middle">%s</text>`, x(tick), chartHeight-8, output.Count(tick))
		}
	}
	for _, l := range lines {
		var path strings.Builder
		for i, p := range l.points {
			fmt.Fprintf(&path, "%s%.1f,%.1f", map[bool]string{true: "M", false: "L"}[i == 0], x(p.Step), y(p.Value))
		}
		fmt.Fprintf(&b, `<path class="%s" d="%s"/>`, l.class, path.String())
		if l.dots {
			for _, p := range l.points {
				fmt.Fprintf(&b, `<circle class="%s" cx="%.1f" cy="%.1f" r="3"><title>step %g: %s</title></circle>`,
					l.class, x(p.Step), y(p.Value), p.Step, output.Number(p.Value))
			}
		}
	}
	b.WriteString(`</svg>`)
	return template.HTML(b.String()) //nolint:gosec // numbers and our own class names
}

// span is the axis of values between low and high. One value alone gets an axis that begins at 0,
// so that a flat line shows how large it is; differences that only rounding makes are none.
func span(low, high float64) (float64, float64) {
	if high-low > 1e-9*max(math.Abs(high), math.Abs(low)) {
		return low, high
	}
	switch value := (low + high) / 2; {
	case value > 0:
		return 0, value * 1.25
	case value < 0:
		return value * 1.25, 0
	}
	return 0, 1
}

// constant is the value that a series has at each of its points; false where it changes.
func (s Series) constant() (float64, bool) {
	finite := s.thin()
	if len(finite) < 2 {
		return 0, false
	}
	low, high := math.Inf(1), math.Inf(-1)
	for _, p := range finite {
		low, high = min(low, p.Value), max(high, p.Value)
	}
	return finite[0].Value, high-low <= 1e-9*max(math.Abs(high), math.Abs(low))
}

// finite returns the points that can be drawn.
func (s Series) finite() (finite Series) {
	for _, p := range s {
		if !math.IsNaN(p.Value) && !math.IsInf(p.Value, 0) {
			finite = append(finite, p)
		}
	}
	return finite
}

// thin returns the finite points, with neighbors joined where there are too many.
func (s Series) thin() Series {
	finite := s.finite()
	if len(finite) <= maxPoints {
		return finite
	}
	out := make(Series, maxPoints)
	for i := range out {
		from, to := i*len(finite)/maxPoints, (i+1)*len(finite)/maxPoints
		for _, p := range finite[from:to] {
			out[i].Step += p.Step / float64(to-from)
			out[i].Value += p.Value / float64(to-from)
		}
	}
	return out
}

// ticks are about four round numbers between low and high.
func ticks(low, high float64) []float64 {
	step := math.Pow(10, math.Floor(math.Log10((high-low)/4)))
	for _, factor := range []float64{1, 2, 5, 10} {
		if (high-low)/(step*factor) <= 5 {
			step *= factor
			break
		}
	}
	var out []float64
	for tick := math.Ceil(low/step) * step; tick <= high+step/1e6; tick += step {
		out = append(out, tick)
	}
	return out
}

func tickText(v float64) string {
	if v == 0 || math.Abs(v) < 1e-12 {
		return "0"
	}
	if a := math.Abs(v); a >= 10000 || a < 0.001 {
		return strconv.FormatFloat(v, 'e', 0, 64)
	}
	return strconv.FormatFloat(math.Round(v*1e6)/1e6, 'f', -1, 64)
}
