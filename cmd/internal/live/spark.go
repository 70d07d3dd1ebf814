package live

import (
	"math"
	"strings"
)

var blocks = []rune("▁▂▃▄▅▆▇█")

// Spark draws values as at most width blocks; if there are more values, a block is the mean of
// neighbors. A constant is drawn at half height.
func Spark(values []float64, width int) string {
	if len(values) == 0 || width <= 0 {
		return ""
	}
	columns := min(width, len(values))
	means := make([]float64, columns)
	low, high := math.Inf(1), math.Inf(-1)
	for i := range means {
		from, to := i*len(values)/columns, (i+1)*len(values)/columns
		for _, v := range values[from:to] {
			means[i] += v / float64(to-from)
		}
		low, high = min(low, means[i]), max(high, means[i])
	}
	var b strings.Builder
	for _, mean := range means {
		level := len(blocks) / 2
		if high > low {
			level = int((mean - low) / (high - low) * float64(len(blocks)))
		}
		b.WriteRune(blocks[min(max(level, 0), len(blocks)-1)])
	}
	return b.String()
}

// Bar is a progress bar of width characters.
func Bar(done, total uint64, width int) string {
	if width <= 0 {
		return ""
	}
	full := 0
	if total > 0 {
		full = int(min(done, total) * uint64(width) / total)
	}
	return strings.Repeat("█", full) + strings.Repeat("░", width-full)
}
