// Package suite computes the metrics of an evaluation suite from the scores of its samples, with
// confidence intervals, and compares two models by them.
package suite

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Kinds of metrics.
const (
	Mean    = "mean"
	Pass    = "pass"
	Best    = "best"
	WinRate = "win_rate"
)

// Metric is a number of the scores of a row, averaged over the rows.
type Metric struct {
	Kind string
	K    int // of pass@K and best@K
}

// Error is a metric that a suite cannot have. Its texts have no field.
type Error struct{ Message, Fix string }

func (e *Error) Error() string { return e.Message + "; " + e.Fix }

// Parse reads a metric. Errors are of type *Error.
func Parse(text string) (Metric, error) {
	if text == Mean || text == WinRate {
		return Metric{Kind: text}, nil
	}
	kind, number, found := strings.Cut(text, "@")
	if kind != Pass && kind != Best || !found {
		return Metric{}, &Error{fmt.Sprintf("the metric %q is unknown", text), "write `mean`, `pass@K`, `best@K`, or `win_rate`"}
	}
	k, err := strconv.Atoi(number)
	if err != nil || k < 1 || number != strconv.Itoa(k) {
		return Metric{}, &Error{fmt.Sprintf("the metric %q names no number of samples", text), fmt.Sprintf("write `%s@4` for 4 samples", kind)}
	}
	return Metric{kind, k}, nil
}

// ParseAll reads the metrics of a suite with a number of samples of each row. compared: it has a
// baseline. Errors are of type *Error.
func ParseAll(texts []string, samples int, compared bool) ([]Metric, error) {
	var all []Metric
	for _, text := range texts {
		m, err := Parse(text)
		if err != nil {
			return nil, err
		}
		switch {
		case m.K > samples:
			return nil, &Error{fmt.Sprintf("%s needs at least %d samples of a row, and there are %d", m, m.K, samples), fmt.Sprintf("write `samples = %d`", m.K)}
		case m.Kind == WinRate && !compared:
			return nil, &Error{"win_rate needs completions to compare with", "write `baseline = \"FILE.parquet\"`"}
		case slices.Contains(all, m):
			return nil, &Error{fmt.Sprintf("%s is listed twice", m), "remove one of them"}
		}
		all = append(all, m)
	}
	return all, nil
}

func (m Metric) String() string {
	if m.K == 0 {
		return m.Kind
	}
	return fmt.Sprintf("%s@%d", m.Kind, m.K)
}

// bounded reports whether values are probabilities.
func (m Metric) bounded() bool { return m.Kind == Pass || m.Kind == WinRate }

// of returns the value of one row, an unbiased estimate from its samples. ok: it has enough of
// them.
func (m Metric) of(scores []float64, passScore float64) (value float64, ok bool) {
	n := len(scores)
	if n < max(1, m.K) {
		return 0, false
	}
	switch m.Kind {
	case Pass:
		passed := 0
		for _, s := range scores {
			if s >= passScore {
				passed++
			}
		}
		return passAt(n, passed, m.K), true
	case Best:
		return bestAt(scores, m.K), true
	}
	sum := 0.0
	for _, s := range scores {
		sum += s
	}
	return sum / float64(n), true
}

// passAt is the probability that one of k of n samples is among the c that passed: 1 - C(n-c, k) /
// C(n, k) (Chen et al. 2021, https://arxiv.org/abs/2107.03374).
func passAt(n, c, k int) float64 {
	if n-c < k {
		return 1
	}
	missed := 1.0
	for i := n - c + 1; i <= n; i++ {
		missed *= 1 - float64(k)/float64(i)
	}
	return 1 - missed
}

// bestAt is the expected highest score of k of the samples, drawn without replacement: the sum of
// C(i-1, k-1) / C(n, k) times the i-th lowest score.
func bestAt(scores []float64, k int) float64 {
	sorted := slices.Sorted(slices.Values(scores))
	n := len(sorted)
	share, best := float64(k)/float64(n), 0.0 // the probability that the i-th lowest is the highest
	for i := n; i >= k; i-- {
		best += share * sorted[i-1]
		if i > 1 {
			share *= float64(i-k) / float64(i-1)
		}
	}
	return best
}
