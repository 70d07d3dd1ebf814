package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/completion"
)

func played(sample uint32, reward float64, moments ...uint32) completion.Completion {
	c := completion.Completion{Sample: sample, Reward: reward, Outcome: "COMPLETED", Times: &completion.Times{}}
	for i := 0; i+2 < len(moments); i += 3 {
		c.Turns = append(c.Turns, completion.Turn{Text: "<guess>"}, completion.Turn{Sampled: true, Text: "3", Reward: 0.25})
		c.Times.Turns = append(c.Times.Turns, completion.TurnTimes{AskedMs: moments[i], SampledMs: moments[i+1], AnsweredMs: moments[i+2], ToolMs: []uint32{5}})
	}
	return c
}

// The page shows the best, the worst, and the longest episode, each once, with the conversation.
func TestEpisodesAreTimelines(t *testing.T) {
	t.Parallel()
	d := learned(1, nil)
	d.Kept = []record.Kept{
		{Step: 1, Completions: []completion.Completion{played(0, 0.5, 1, 100, 200), played(1, -1, 0, 50, 60, 60, 4000, 9000), {Sample: 2, Reward: 7}}},
		{Step: 9, Completions: []completion.Completion{played(3, 2, 0, 10, 20), played(4, 2, 0, 0, 0)}},
	}
	got := episodes(d.Kept)
	var titles []string
	for _, e := range got {
		titles = append(titles, e.Title)
		decoder := xml.NewDecoder(strings.NewReader(string(e.SVG)))
		for {
			if _, err := decoder.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%v in %s", err, e.SVG)
			}
		}
	}
	if want := "best: step 9, row 0, sample 3; worst, longest: step 1, row 0, sample 1"; strings.Join(titles, "; ") != want {
		t.Errorf("got %q, want %q", strings.Join(titles, "; "), want)
	}
	if worst := string(got[1].SVG); strings.Count(worst, `class="a"`) != 2 || strings.Count(worst, `class="c"`) != 2 || strings.Count(worst, `class="reward"`) != 2 {
		t.Errorf("bars are missing: %s", worst)
	}
	var page bytes.Buffer
	if err := d.HTML(&page); err != nil || !strings.Contains(page.String(), "&lt;guess&gt;") || strings.Contains(page.String(), "<guess>") {
		t.Errorf("%v: the conversation is missing or not escaped", err)
	}
	if len(episodes([]record.Kept{{Completions: []completion.Completion{{Reward: 1}}}})) != 0 {
		t.Error("a run of single turns has episodes")
	}
}
