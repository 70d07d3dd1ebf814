package completion

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math"
	"testing"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// A completion is joined with the times of the same sample, and is JSON whatever its numbers are.
func TestOf(t *testing.T) {
	t.Parallel()
	var logprobs bytes.Buffer
	for _, v := range []float32{-0.12345678, float32(math.Inf(-1)), float32(math.NaN())} {
		_ = binary.Write(&logprobs, binary.LittleEndian, v)
	}
	recorded := []*learnerv1.Completion{
		{Index: 3, Sample: 1, Outcome: trajectoryv1.Outcome_OUTCOME_TRUNCATED, TokenIds: []byte{1, 2, 0, 0, 255, 255, 255, 255}, Logprobs: logprobs.Bytes(),
			LossMask:     []byte{0, 1, 1, 0, 1},
			Turns:        []*trajectoryv1.Turn{{Sampled: true, Start: 2, End: 4, Messages: []string{`{"role": "assistant"}`, `{`}, Reward: 0.5}},
			VersionSpans: []*trajectoryv1.VersionSpan{{Version: 7, End: 2, Digest: "d"}}},
		{Index: 3, Sample: 1, Part: 1},
	}
	samples := []*bufferv1.SampleRef{
		{Key: &trajectoryv1.TrajectoryKey{Index: 3, Sample: 1, Part: 1}},
		{Key: &trajectoryv1.TrajectoryKey{Index: 3, Sample: 1}, Times: &trajectoryv1.EpisodeTimes{
			BeganUnixMs: 9, Turns: []*trajectoryv1.TurnTimes{{AskedMs: 1, SampledMs: 2, AnsweredMs: 3, ToolMs: []uint32{4}}}}},
	}
	got, err := json.Marshal(Of(recorded, samples))
	want := `[{"epoch":0,"index":3,"sample":1,"prompt":"","completion":"","reward":0,"advantage":null,"tokens":0,"truncated":false,"outcome":"TRUNCATED",` +
		`"turns":[{"sampled":true,"start":2,"end":4,"messages":[{"role":"assistant"}],"reward":0.5}],` +
		`"times":{"began_unix_ms":9,"turns":[{"asked_ms":1,"sampled_ms":2,"answered_ms":3,"tool_ms":[4]}]},"spans":[{"version":7,"start":0,"end":2}],` +
		`"token_ids":[513,-1],"logprobs":[-0.1235,-10000,0],"trained":[[1,3],[4,5]]},` +
		`{"epoch":0,"index":3,"sample":1,"part":1,"prompt":"","completion":"","reward":0,"advantage":null,"tokens":0,"truncated":false}]`
	if err != nil || string(got) != want {
		t.Errorf("got  %s, %v\nwant %s", got, err, want)
	}
}
