package report

import (
	"fmt"
	"image/color"
	"io"
	"math"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/rollout-rl/rollout/cmd/internal/live"
)

var (
	blue   = color.RGBA{0x2a, 0x6f, 0xdb, 0xff}
	pale   = color.RGBA{0xb6, 0xcd, 0xf2, 0xff}
	orange = color.RGBA{0xd9, 0x6a, 0x1d, 0xff}
	grid   = color.RGBA{0xe4, 0xe6, 0xea, 0xff}
	ink    = color.RGBA{0x33, 0x38, 0x40, 0xff}
)

// palette has the colors of compared runs: those of the classes a to f of the page.
var palette = []color.RGBA{blue, orange, {0x1d, 0x9a, 0x6c, 0xff}, {0x9a, 0x4f, 0xc4, 0xff}, {0xc0, 0x39, 0x2b, 0xff}, {0x0e, 0x8a, 0x9e, 0xff}}

const dotsPerInch = 144

// PNG draws the reward curve.
func (d *Data) PNG(w io.Writer) error {
	run := d.Run.Status.GetRun()
	name, points := d.curve()
	p := newPlot(fmt.Sprintf("%s  (%s)", run.GetName(), run.GetRunId()), strings.TrimSuffix(name, "/mean"))
	if err := addLine(p, points, pale, vg.Points(1), ""); err != nil {
		return err
	}
	if err := addLine(p, points.smooth(), blue, vg.Points(2), name+" while training"); err != nil {
		return err
	}
	if evalName, evals := d.evalCurve(); len(evals) > 0 {
		if err := addLine(p, evals, orange, vg.Points(2), evalName+" on held-out rows"); err != nil {
			return err
		}
		dots, err := plotter.NewScatter(xys(evals))
		if err != nil {
			return fmt.Errorf("draw evaluations: %w", err)
		}
		dots.GlyphStyle = draw.GlyphStyle{Color: orange, Radius: vg.Points(3), Shape: draw.CircleGlyph{}}
		p.Add(dots)
	}
	if len(xys(points)) == 0 {
		if err := addText(p, "no step was committed: the run is "+live.State(run.GetState())); err != nil {
			return err
		}
	}
	flatAxis(p, points)
	if name != "loss" && p.Y.Min >= 0 && p.Y.Max <= 1.0001 {
		p.Y.Min = 0
		if p.Y.Max > 0.5 { // lower rewards would be a flat line
			p.Y.Max = 1.02
		}
	}
	_, evals := d.evalCurve()
	p.Legend.Top = low(xys(points.smooth()), xys(evals), (p.Y.Min+p.Y.Max)/2)
	return writePNG(p, w)
}

// newPlot returns a plot over the steps in the style of our reports.
func newPlot(title, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, "optimizer step", y
	p.Title.Padding, p.X.Label.Padding, p.Y.Label.Padding = vg.Points(12), vg.Points(6), vg.Points(6)
	for _, text := range []*font.Font{&p.Title.TextStyle.Font, &p.X.Label.TextStyle.Font, &p.Y.Label.TextStyle.Font, &p.X.Tick.Label.Font, &p.Y.Tick.Label.Font, &p.Legend.TextStyle.Font} {
		text.Variant = "Sans"
	}
	p.Title.TextStyle.Color, p.X.Label.TextStyle.Color, p.Y.Label.TextStyle.Color = ink, ink, ink
	p.Legend.Padding, p.Legend.XOffs, p.Legend.YOffs = vg.Points(3), vg.Points(-8), vg.Points(8)
	lines := plotter.NewGrid()
	lines.Horizontal.Color, lines.Vertical.Color = grid, grid
	p.Add(lines)
	return p
}

// flatAxis sets the axis of values where all of them are equal to those of points.
func flatAxis(p *plot.Plot, points Series) {
	if finite := points.finite(); len(finite) > 0 && p.Y.Max-p.Y.Min <= 1e-9*max(math.Abs(p.Y.Max), math.Abs(p.Y.Min)) {
		p.Y.Min, p.Y.Max = span(finite[0].Value, finite[0].Value)
	}
}

func writePNG(p *plot.Plot, w io.Writer) error {
	canvas := vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(9*vg.Inch, 5*vg.Inch), vgimg.UseDPI(dotsPerInch))}
	p.Draw(draw.Crop(draw.New(canvas), vg.Points(12), vg.Points(-16), vg.Points(10), vg.Points(-12)))
	if _, err := canvas.WriteTo(w); err != nil {
		return fmt.Errorf("write the curve: %w", err)
	}
	return nil
}

// low reports whether the curves end in the lower half, so that the legend is placed at the top.
func low(curve, evals plotter.XYs, middle float64) bool {
	sum, n := 0.0, 0
	for _, values := range []plotter.XYs{curve, evals} {
		for _, v := range values[len(values)*2/3:] {
			sum, n = sum+v.Y, n+1
		}
	}
	return n > 0 && sum/float64(n) < middle
}

// addText writes a sentence instead of a curve.
func addText(p *plot.Plot, text string) error {
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, 1, 0, 1
	labels, err := plotter.NewLabels(plotter.XYLabels{XYs: plotter.XYs{{X: 0.5, Y: 0.5}}, Labels: []string{text}})
	if err != nil {
		return fmt.Errorf("draw a sentence: %w", err)
	}
	style := &labels.TextStyle[0]
	style.Font.Variant, style.Font.Size, style.Color, style.XAlign = "Sans", vg.Points(14), ink, -0.5
	p.Add(labels)
	return nil
}

func addLine(p *plot.Plot, points Series, c color.Color, width vg.Length, label string) error {
	values := xys(points)
	if len(values) == 0 {
		return nil
	}
	line, err := plotter.NewLine(values)
	if err != nil {
		return fmt.Errorf("draw %s: %w", label, err)
	}
	line.Color, line.Width = c, width
	p.Add(line)
	if label != "" {
		p.Legend.Add(label, line)
	}
	return nil
}

// xys omits values that cannot be drawn.
func xys(points Series) plotter.XYs {
	var out plotter.XYs
	for _, p := range points {
		if !math.IsNaN(p.Value) && !math.IsInf(p.Value, 0) {
			out = append(out, plotter.XY{X: p.Step, Y: p.Value})
		}
	}
	return out
}
