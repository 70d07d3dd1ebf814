package suite

import "math"

// Difference is that of two models in one metric, by the rows that both have.
type Difference struct {
	Metric      string   `json:"metric"`
	Part        bool     `json:"part"` // as of Value
	A           float64  `json:"a"`
	B           float64  `json:"b"`
	Difference  float64  `json:"difference"` // B less A
	Stderr      *float64 `json:"stderr"`     // null: unknown, as of one cluster
	Low         *float64 `json:"low"`        // null, like High: the rows are of one cluster or differ by the same
	High        *float64 `json:"high"`
	P           *float64 `json:"p"` // probability of a difference at least as large between equal models; null: Untested
	Test        string   `json:"test"`
	Rows        int      `json:"rows"`
	Significant bool     `json:"significant"` // P < 0.05
}

// Kinds of tests.
const (
	McNemar  = "mcnemar" // exact, of rows that one of two models passes
	Paired   = "paired"  // of the mean difference of a row, by the central limit theorem over clusters
	Untested = "none"    // there are fewer than MinClusters
)

// MinClusters is how many rows, or clusters of related ones, Paired needs. With few, the test finds
// too many differences between equal models, and fewer than 20 to 50 are few (Cameron and Miller
// 2015, A Practitioner's Guide to Cluster-Robust Inference, section VI).
const MinClusters = 20

// Compare compares two models by the rows that have a value with both. ok: there are some.
func (m Metric) Compare(a, b []Row, passScore float64) (d Difference, ok bool) {
	other := map[int]float64{}
	for _, row := range b {
		if value, ok := m.of(row.Scores, passScore); ok {
			other[row.Row] = value
		}
	}
	var first, second, differences []float64
	var clusters []string
	for _, row := range a {
		value, ok := m.of(row.Scores, passScore)
		with, also := other[row.Row]
		if !ok || !also {
			continue
		}
		first, second = append(first, value), append(second, with)
		differences, clusters = append(differences, with-value), append(clusters, row.Cluster)
	}
	if len(differences) == 0 {
		return Difference{}, false
	}
	mean, stderr, count := clustered(differences, clusters)
	d = Difference{Metric: m.String(), A: meanOf(first), B: meanOf(second), Difference: mean, Rows: len(differences), Test: Paired}
	if count > 1 {
		d.Stderr = &stderr
	}
	if stderr > 0 {
		low, high := mean-z95*stderr, mean+z95*stderr
		d.Low, d.High = &low, &high
	}
	p := 1.0
	switch {
	case count == len(differences) && binary(first) && binary(second):
		d.Test, p = McNemar, mcnemar(differences)
	case count < MinClusters:
		d.Test = Untested
		return d, true
	case stderr > 0:
		p = math.Erfc(math.Abs(mean/stderr) / math.Sqrt2)
	case mean != 0: // each row differs by the same: the sign test
		p = math.Exp2(float64(1 - count))
	}
	d.P, d.Significant = &p, p < 0.05
	return d, true
}

func meanOf(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// mcnemar returns the probability that rows on which equal models differ divide at least as
// unequally, from differences of -1, 0, and 1.
func mcnemar(differences []float64) float64 {
	up, down := 0, 0
	for _, d := range differences {
		switch {
		case d > 0:
			up++
		case d < 0:
			down++
		}
	}
	n, few := up+down, min(up, down)
	tail := 0.0
	for i := range few + 1 {
		tail += math.Exp(choose(n, i) - float64(n)*math.Ln2)
	}
	return min(1, 2*tail)
}

// choose is the logarithm of a binomial coefficient.
func choose(n, k int) float64 {
	gamma := func(x int) float64 {
		v, _ := math.Lgamma(float64(x) + 1)
		return v
	}
	return gamma(n) - gamma(k) - gamma(n-k)
}
