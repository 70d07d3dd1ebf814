package output

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"
)

// Table aligns columns of text.
type Table struct {
	rows [][]string
}

// Row appends a row.
func (t *Table) Row(cells ...string) { t.rows = append(t.rows, cells) }

// String returns the table with two spaces between columns and none at line ends.
func (t *Table) String() string {
	var widths []int
	for _, row := range t.rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], ansi.StringWidth(cell))
		}
	}
	var b strings.Builder
	for _, row := range t.rows {
		var line strings.Builder
		for i, cell := range row {
			line.WriteString(cell)
			line.WriteString(strings.Repeat(" ", widths[i]-ansi.StringWidth(cell)+2))
		}
		b.WriteString(strings.TrimRight(line.String(), " "))
		b.WriteByte('\n')
	}
	return b.String()
}

// Bytes formats a size: "3.2 MB".
func Bytes(n uint64) string {
	if n < 1000 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n), ""
	for _, unit = range []string{"kB", "MB", "GB", "TB"} {
		if value /= 1000; value < 999.95 {
			break
		}
	}
	return fmt.Sprintf("%.1f %s", value, unit)
}

// Count formats a number with separators: "12,300".
func Count[N int | int64 | uint64 | uint32 | float64](n N) string {
	digits := fmt.Sprintf("%.0f", float64(n))
	for i := len(digits) - 3; i > 0 && digits[i-1] != '-'; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

// Plural formats a count with a noun: "1 row", "1,200 rows".
func Plural[N int | int64 | uint64 | uint32](n N, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return Count(n) + " " + one + "s"
}

// Duration formats a time span: "42 s", "3 min 5 s", "2 h 10 min".
func Duration(d time.Duration) string {
	switch {
	case d < 0:
		return "0 s"
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	}
	return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
}

// Number formats a metric with about four digits.
func Number(v float64) string {
	switch a := max(v, -v); {
	case v != v:
		return "nan"
	case a == math.Trunc(a) && a < 10000:
		return fmt.Sprintf("%.0f", v)
	case a >= 10000:
		return Count(v)
	case a >= 100:
		return fmt.Sprintf("%.1f", v)
	case a >= 0.001:
		return fmt.Sprintf("%.3f", v)
	}
	return fmt.Sprintf("%.2e", v)
}

// Short returns the beginning of a content id.
func Short(contentID string) string {
	const head = len("blake3-") + 12
	return contentID[:min(len(contentID), head)]
}

// More returns a note that a list has further rows; "" without the token of a next page.
func More(rows, next string) string {
	if next == "" {
		return ""
	}
	return "there are more " + rows + "; raise --limit, or list all with --limit 0\n"
}
