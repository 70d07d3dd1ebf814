package infer

import (
	"fmt"
	"slices"
	"testing"
)

func TestAWarningIsToldOnceAndCounted(t *testing.T) {
	t.Parallel()
	var told []string
	w := &warnings{tell: func(line string) { told = append(told, line) }, again: map[string]int{}}
	for n := range 40 {
		if _, err := fmt.Fprintf(w, "2026-01-01 00:00:00 WARNING rewards: a reward failed\nsomething else\n2026 ERROR x: number %d\n", n); err != nil {
			t.Fatal(err)
		}
	}
	w.counts()
	want := []string{"a reward failed"}
	for n := range mostTold - 1 {
		want = append(want, fmt.Sprintf("number %d", n))
	}
	want = append(want, "further warnings are not shown", "39 more: a reward failed")
	if !slices.Equal(told, want) {
		t.Errorf("got  %q\nwant %q", told, want)
	}
}
