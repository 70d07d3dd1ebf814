package inference

import (
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/infer"
)

func TestInferProgress(t *testing.T) {
	t.Parallel()
	mean := 0.625
	got := progressText(infer.Event{Rows: 80, Of: 120, Samples: 80, Tokens: 400, Seconds: 2, MeanScore: &mean, Failures: map[string]uint64{"REWARD_TIMEOUT": 3}}, 40)
	want := "████████████████░░░░░░░░  67%  80 of 120 rows  20 rows/s  200 tokens/s  2.0 s left  mean score 0.625  failed: REWARD_TIMEOUT 3"
	if got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := progressText(infer.Event{}, 0); !strings.Contains(got, "0 of 0 rows") {
		t.Error(got)
	}
}

func TestProgressText(t *testing.T) {
	t.Parallel()
	mean := 0.5
	for _, c := range []struct {
		event infer.Event
		kept  int
		want  string
	}{
		{infer.Event{Of: 8}, 0, "░░░░░░░░░░░░░░░░░░░░░░░░   0%  0 of 8 rows"},
		{infer.Event{Of: 8, Retries: 2}, 0, "░░░░░░░░░░░░░░░░░░░░░░░░   0%  0 of 8 rows  reward retries: 2"},
		{
			infer.Event{Rows: 6, Of: 8, Tokens: 30, Seconds: 2, MeanScore: &mean, Retries: 1, Failures: map[string]uint64{"REWARD_TIMEOUT": 3}}, 2,
			"██████████████████░░░░░░  75%  6 of 8 rows  2 rows/s  15 tokens/s  1.0 s left  mean score 0.500  reward retries: 1  failed: REWARD_TIMEOUT 3",
		},
	} {
		if got := progressText(c.event, c.kept); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}
