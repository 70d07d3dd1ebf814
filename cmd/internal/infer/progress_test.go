package infer

import "testing"

func TestProgressSaysWhatIsWaitedFor(t *testing.T) {
	t.Parallel()
	if got, want := Loading(Event{Model: "/models/tiny", Rows: 1200}), "loading /models/tiny for 1,200 rows"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	mean := 0.5
	for _, c := range []struct {
		event Event
		kept  int
		want  string
	}{
		{Event{Of: 8}, 0, "░░░░░░░░░░░░░░░░░░░░░░░░   0%  0 of 8 rows"},
		{Event{Of: 8, Retries: 2}, 0, "░░░░░░░░░░░░░░░░░░░░░░░░   0%  0 of 8 rows  reward tried again: 2"},
		{
			Event{Rows: 6, Of: 8, Tokens: 30, Seconds: 2, MeanScore: &mean, Retries: 1, Failures: map[string]uint64{"REWARD_TIMEOUT": 3}}, 2,
			"██████████████████░░░░░░  75%  6 of 8 rows  2 rows/s  15 tokens/s  1.0 s left  mean score 0.500  reward tried again: 1  failed: REWARD_TIMEOUT 3",
		},
	} {
		if got := Progress(c.event, c.kept); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}
