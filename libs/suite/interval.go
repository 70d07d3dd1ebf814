package suite

import (
	"maps"
	"math"
	"slices"
)

// z95 is the quantile of a normal distribution for an interval of 95 %.
const z95 = 1.959963984540054

// Row has the scores of one row. Cluster: rows with the same are one observation; "": it is one
// itself.
type Row struct {
	Row     int
	Scores  []float64 // of the samples that have one
	Cluster string
}

// Value is a metric with its interval of 95 %.
type Value struct {
	Metric   string   `json:"metric"`
	Part     bool     `json:"part"` // of the reward: the mean of one of its further numbers
	Value    float64  `json:"value"`
	Stderr   *float64 `json:"stderr"` // null: unknown, as of one cluster
	Low      *float64 `json:"low"`    // null, like High: unknown
	High     *float64 `json:"high"`
	Rows     int      `json:"rows"`     // with enough samples that have a score
	Clusters int      `json:"clusters"` // the rows, or groups of related ones
	Interval string   `json:"interval"` // Wilson, Normal, or None
}

// Kinds of intervals.
const (
	Wilson = "wilson" // of a share of rows
	Normal = "normal" // of a mean, by the central limit theorem over clusters
	None   = "none"   // the values are of one cluster or all equal: their variance is unknown
)

// Compute returns a metric over the rows. ok: a row has a value.
func (m Metric) Compute(rows []Row, passScore float64) (v Value, ok bool) {
	values, clusters := m.values(rows, passScore)
	if len(values) == 0 {
		return Value{}, false
	}
	mean, stderr, count := clustered(values, clusters)
	v = Value{Metric: m.String(), Value: mean, Rows: len(values), Clusters: count}
	if count > 1 {
		v.Stderr = &stderr
	}
	low, high := 0.0, 1.0
	switch {
	case binary(values) && (count == len(values) || mean == 0 || mean == 1):
		v.Interval = Wilson
		low, high = wilson(mean, float64(count))
	case stderr > 0:
		v.Interval = Normal
		low, high = mean-z95*stderr, mean+z95*stderr
		if m.bounded() {
			low, high = max(0, low), min(1, high)
		}
	default:
		if v.Interval = None; !m.bounded() {
			return v, true
		}
	}
	v.Low, v.High = &low, &high
	return v, true
}

// Measured returns a metric that a library has computed, with the normal interval of its standard
// error; nil: it has none.
func Measured(name string, value float64, stderr *float64, samples int) Value {
	v := Value{Metric: name, Value: value, Stderr: stderr, Rows: samples, Clusters: samples, Interval: None}
	if stderr != nil && *stderr > 0 {
		low, high := value-z95**stderr, value+z95**stderr
		v.Low, v.High, v.Interval = &low, &high, Normal
	}
	return v
}

// values returns the values of the rows that have one, with their clusters.
func (m Metric) values(rows []Row, passScore float64) (values []float64, clusters []string) {
	for _, row := range rows {
		if value, ok := m.of(row.Scores, passScore); ok {
			values, clusters = append(values, value), append(clusters, row.Cluster)
		}
	}
	return values, clusters
}

// clustered returns the mean of values and its standard error, in which values of one cluster are
// not independent (Miller 2024, https://arxiv.org/abs/2411.00640), and the number of clusters. A
// value with the cluster "" is a cluster alone. The error of one cluster is 0.
func clustered(values []float64, clusters []string) (mean, stderr float64, count int) {
	for _, v := range values {
		mean += v
	}
	mean /= float64(len(values))
	sums, squares := map[string]float64{}, 0.0
	for i, v := range values {
		if clusters[i] == "" {
			squares += (v - mean) * (v - mean)
			count++
		} else {
			sums[clusters[i]] += v - mean
		}
	}
	count += len(sums)
	if count < 2 {
		return mean, 0, count
	}
	for _, name := range slices.Sorted(maps.Keys(sums)) { // in one order, so that the bits are the same each time
		squares += sums[name] * sums[name]
	}
	c := float64(count)
	return mean, math.Sqrt(squares*c/(c-1)) / float64(len(values)), count
}

func binary(values []float64) bool {
	return !slices.ContainsFunc(values, func(v float64) bool { return v != 0 && v != 1 })
}

// wilson returns the score interval of a share of n (Wilson 1927). Unlike the normal one it is not
// empty for shares of 0 and 1.
func wilson(share, n float64) (low, high float64) {
	z2 := z95 * z95
	center := (share + z2/(2*n)) / (1 + z2/n)
	half := z95 / (1 + z2/n) * math.Sqrt(share*(1-share)/n+z2/(4*n*n))
	return max(0, center-half), min(1, center+half)
}
