package infer

import (
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/cmd/internal/infer"
)

func TestInferProgress(t *testing.T) {
	t.Parallel()
	mean := 0.625
	got := infer.Progress(infer.Event{Rows: 80, Of: 120, Samples: 80, Tokens: 400, Seconds: 2, MeanScore: &mean, Failures: map[string]uint64{"REWARD_TIMEOUT": 3}}, 40)
	want := "████████████████░░░░░░░░  67%  80 of 120 rows  20 rows/s  200 tokens/s  2.0 s left  mean score 0.625  failed: REWARD_TIMEOUT 3"
	if got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := infer.Progress(infer.Event{}, 0); !strings.Contains(got, "0 of 0 rows") {
		t.Error(got)
	}
}
