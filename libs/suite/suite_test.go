package suite

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-9 }

func TestMetricsAreParsed(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"mean": "", "pass@1": "", "pass@4": "", "best@2": "", "win_rate": "",
		"accuracy":      `the metric "accuracy" is unknown; write`,
		"pass":          `the metric "pass" is unknown`,
		"pass@0":        `the metric "pass@0" names no number of samples; write ` + "`pass@4` for 4 samples",
		"pass@04":       "names no number of samples",
		"best@x":        "write `best@4`",
		"pass@5":        "pass@5 needs at least 5 samples of a row, and there are 4; write `samples = 5`",
		"mean mean":     "mean is listed twice; remove one of them",
		"pass@1 best@1": "",
	} {
		metrics, err := ParseAll(strings.Fields(text), 4, true)
		if want == "" && (err != nil || metrics[0].String() != strings.Fields(text)[0]) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v %v, want %q", text, metrics, err, want)
		}
	}
	if _, err := ParseAll([]string{"win_rate"}, 1, false); err == nil || !strings.Contains(err.Error(), "baseline") {
		t.Error(err)
	}
}

// The estimates are the averages over all subsets of the samples.
func TestEstimatesAreUnbiased(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		n := 1 + random.IntN(7)
		scores := make([]float64, n)
		for i := range scores {
			scores[i] = float64(random.IntN(4)) / 2
		}
		for k := 1; k <= n; k++ {
			passed, best, subsets := 0.0, 0.0, 0.0
			for chosen := range 1 << n {
				var drawn []float64
				for i := range n {
					if chosen>>i&1 == 1 {
						drawn = append(drawn, scores[i])
					}
				}
				if len(drawn) != k {
					continue
				}
				subsets++
				best += slices.Max(drawn)
				if slices.Max(drawn) >= 1 {
					passed++
				}
			}
			if got, _ := (Metric{Pass, k}).of(scores, 1); !near(got, passed/subsets) {
				t.Errorf("pass@%d of %v is %v, want %v", k, scores, got, passed/subsets)
			}
			if got, _ := (Metric{Best, k}).of(scores, 1); !near(got, best/subsets) {
				t.Errorf("best@%d of %v is %v, want %v", k, scores, got, best/subsets)
			}
		}
	}
	if got := passAt(200, 37, 100); !(got > 0.999999 && got <= 1) {
		t.Error(got)
	}
}

func rows(scores ...[]float64) (out []Row) {
	for i, s := range scores {
		out = append(out, Row{Row: i, Scores: s})
	}
	return out
}

func TestIntervals(t *testing.T) {
	t.Parallel()
	one := func(v float64) []float64 { return []float64{v} }
	// Wilson's interval of 8 of 10 (R: prop.test(8, 10, correct = FALSE))
	var shares [][]float64
	for i := range 10 {
		shares = append(shares, one(map[bool]float64{true: 1}[i < 8]))
	}
	v, ok := (Metric{Kind: Mean}).Compute(rows(shares...), 1)
	if !ok || v.Interval != Wilson || v.Value != 0.8 || math.Abs(*v.Low-0.4901625) > 1e-6 || math.Abs(*v.High-0.9433178) > 1e-6 {
		t.Errorf("%+v", v)
	}
	// several samples of a row are one observation
	v, _ = (Metric{Kind: Mean}).Compute(rows([]float64{1, 0}, []float64{1, 1}, []float64{0, 0}, []float64{0, 1}), 1)
	if want := math.Sqrt(0.5/3) / 2; v.Interval != Normal || v.Value != 0.5 || !near(*v.Stderr, want) || !near(*v.High-*v.Low, 2*z95*want) {
		t.Errorf("%+v, want an error of %v", v, want)
	}
	// equal rows of a cluster add nothing
	related := rows(one(1), one(1), one(0), one(0))
	for i := range related {
		related[i].Cluster = string(rune('a' + i/2))
	}
	alone, _ := (Metric{Kind: Mean}).Compute(rows(one(1), one(0)), 1)
	v, _ = (Metric{Kind: Mean}).Compute(related, 1)
	if v.Clusters != 2 || v.Interval != Normal || !near(*v.Stderr, *alone.Stderr) {
		t.Errorf("%+v, want the error of %+v", v, alone)
	}
	// a row without scores, or with too few, is left out
	v, _ = (Metric{Pass, 2}).Compute(rows([]float64{1, 0}, one(1), nil), 1)
	if v.Rows != 1 || v.Value != 1 {
		t.Errorf("%+v", v)
	}
	if _, ok := (Metric{Kind: Mean}).Compute(rows(nil), 1); ok {
		t.Error("a suite without scores has a value")
	}
}

// One cluster, and values that are all equal, do not show how much values vary.
func TestIntervalsWithoutVariance(t *testing.T) {
	t.Parallel()
	of := func(cluster string, scores ...[]float64) []Row {
		all := rows(scores...)
		for i := range all {
			all[i].Cluster = cluster
		}
		return all
	}
	for name, c := range map[string]struct {
		metric    Metric
		rows      []Row
		interval  string
		low, high float64 // both 0: unknown
		stderr    bool
	}{
		"a mean of one cluster":       {Metric{Kind: Mean}, of("a", []float64{0.2}, []float64{0.7}), None, 0, 0, false},
		"a share of one cluster":      {Metric{Pass, 1}, of("a", []float64{1}, []float64{0}), None, 0, 1, false},
		"one cluster, all of it pass": {Metric{Pass, 1}, of("a", []float64{1}, []float64{1}), Wilson, 0.2065493, 1, false},
		"one row":                     {Metric{Kind: Mean}, rows([]float64{0.7}), None, 0, 0, false},
		"equal rows":                  {Metric{Kind: Mean}, rows([]float64{0.5}, []float64{0.5}), None, 0, 0, true},
		"equal shares":                {Metric{Pass, 1}, rows([]float64{1, 0}, []float64{1, 0}), None, 0, 1, true},
	} {
		v, ok := c.metric.Compute(c.rows, 1)
		known := c.low != 0 || c.high != 0
		if !ok || v.Interval != c.interval || (v.Low != nil) != known || (v.High != nil) != known || (v.Stderr != nil) != c.stderr {
			t.Errorf("%s: %+v", name, v)
		} else if known && (math.Abs(*v.Low-c.low) > 1e-6 || math.Abs(*v.High-c.high) > 1e-6) {
			t.Errorf("%s: %v to %v", name, *v.Low, *v.High)
		}
	}
}

// Of many repeated evaluations, about 95 % have intervals with the true value.
func TestIntervalsCover(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(3, 4))
	const trials = 2000
	for _, samples := range []int{1, 4} {
		covered := 0
		for range trials {
			var all []Row
			for i := range 60 {
				ability := random.Float64() // of the row; 0.5 on average
				var scores []float64
				for range samples {
					scores = append(scores, map[bool]float64{true: 1}[random.Float64() < ability])
				}
				all = append(all, Row{Row: i, Scores: scores})
			}
			if v, _ := (Metric{Kind: Mean}).Compute(all, 1); *v.Low <= 0.5 && 0.5 <= *v.High {
				covered++
			}
		}
		if share := float64(covered) / trials; share < 0.93 || share > 0.97 {
			t.Errorf("%d samples: %v of the intervals have the true value", samples, share)
		}
	}
}

func TestComparisons(t *testing.T) {
	t.Parallel()
	one := func(v float64) []float64 { return []float64{v} }
	// b passes 9 rows that a fails, a passes 1 that b fails (R: binom.test(1, 10))
	var a, b []Row
	for i := range 30 {
		first, second := 1.0, 1.0
		switch {
		case i < 9:
			first = 0
		case i == 9:
			second = 0
		}
		a, b = append(a, Row{Row: i, Scores: one(first)}), append(b, Row{Row: i, Scores: one(second)})
	}
	d, ok := (Metric{Kind: Mean}).Compare(a, b, 1)
	if !ok || d.Test != McNemar || !near(d.Difference, 8.0/30) || math.Abs(*d.P-0.021484375) > 1e-9 || !d.Significant || d.Rows != 30 {
		t.Errorf("%+v", d)
	}
	d, _ = (Metric{Kind: Mean}).Compare(a, a, 1)
	if *d.P != 1 || d.Difference != 0 || d.Significant {
		t.Errorf("%+v", d)
	}
	// rows differ more from each other than the models do: only pairs show the difference
	a, b = nil, nil
	for i := range 20 {
		level := float64(i) * 10
		a = append(a, Row{Row: i, Scores: one(level)})
		b = append(b, Row{Row: i, Scores: one(level + 1 + 0.1*float64(i%3))})
	}
	b = append(b, Row{Row: 99, Scores: one(5)}) // only one model has it
	d, _ = (Metric{Kind: Mean}).Compare(a, b, 1)
	if d.Test != Paired || d.Rows != 20 || *d.P > 1e-6 || *d.Low > d.Difference || *d.High < d.Difference {
		t.Errorf("%+v", d)
	}
	if _, ok := (Metric{Kind: Mean}).Compare(a, nil, 1); ok {
		t.Error("rows of one model were compared")
	}
}

// Few rows show no significant difference, however large or equal their differences are.
func TestComparisonsOfFewRows(t *testing.T) {
	t.Parallel()
	differing := func(count int, by func(i int) float64, cluster func(i int) string) Difference {
		var a, b []Row
		for i := range count {
			a = append(a, Row{Row: i, Scores: []float64{0.5}, Cluster: cluster(i)})
			b = append(b, Row{Row: i, Scores: []float64{0.5 + by(i)}, Cluster: cluster(i)})
		}
		d, ok := (Metric{Kind: Mean}).Compare(a, b, 1)
		if !ok {
			t.Fatal("the rows were not compared")
		}
		return d
	}
	equal, spread := func(int) float64 { return 0.25 }, func(i int) float64 { return 1 + 0.1*float64(i%3) }
	alone, pairs := func(int) string { return "" }, func(i int) string { return string(rune('a' + i/2)) }
	for name, d := range map[string]Difference{
		"one row": differing(1, equal, alone), "equal differences": differing(2, equal, alone),
		"few rows": differing(MinClusters-1, spread, alone), "few clusters": differing(MinClusters, spread, pairs),
	} {
		if d.Test != Untested || d.P != nil || d.Significant {
			t.Errorf("%s: %+v", name, d)
		}
	}
	if d := differing(2, equal, alone); d.Low != nil || d.High != nil {
		t.Errorf("%+v", d)
	}
	if d := differing(MinClusters, equal, alone); d.Test != Paired || d.P == nil || !near(*d.P, math.Exp2(1-MinClusters)) || !d.Significant {
		t.Errorf("%+v", d)
	}
}

// Equal models differ significantly in about 5 % of comparisons with the fewest rows.
func TestPairedTestOfEqualModels(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(5, 6))
	const trials = 4000
	significant := 0
	for range trials {
		var a, b []Row
		for i := range MinClusters {
			a = append(a, Row{Row: i, Scores: []float64{random.Float64()}})
			b = append(b, Row{Row: i, Scores: []float64{random.Float64()}})
		}
		if d, _ := (Metric{Kind: Mean}).Compare(a, b, 1); d.Significant {
			significant++
		}
	}
	if share := float64(significant) / trials; share < 0.04 || share > 0.08 {
		t.Errorf("%v of the comparisons are significant", share)
	}
}
