package infer

import (
	"fmt"
	"slices"
	"testing"
)

func TestWarningsAreReportedOnceAndCounted(t *testing.T) {
	t.Parallel()
	var reported []string
	w := &warnings{report: func(text string, n int) { reported = append(reported, fmt.Sprintf("%d %s", n, text)) }, repeated: map[string]int{}}
	for n := range 40 {
		if _, err := fmt.Fprintf(w, "2026-01-01 00:00:00 WARNING rewards: a reward failed\nsomething else\n2026 ERROR x: number %d\n", n); err != nil {
			t.Fatal(err)
		}
	}
	w.flush()
	want := []string{"0 a reward failed"}
	for n := range maxWarnings - 1 {
		want = append(want, fmt.Sprintf("0 number %d", n))
	}
	want = append(want, "0 further warnings are not shown", "39 a reward failed")
	if !slices.Equal(reported, want) {
		t.Errorf("got  %q\nwant %q", reported, want)
	}
}
