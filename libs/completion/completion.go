// Package completion encodes and decodes the events that describe the samples of a step.
package completion

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"strings"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	learnerv1 "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// Completion is one of the list that the attribute `completions` of the event of that kind holds as
// JSON. Long texts are truncated.
type Completion struct {
	Epoch      uint32   `json:"epoch"`
	Index      uint64   `json:"index"`
	Sample     uint32   `json:"sample"`
	Part       uint32   `json:"part,omitempty"`
	Parent     *Parent  `json:"parent,omitempty"` // of a child session
	Prompt     string   `json:"prompt"`
	Completion string   `json:"completion"`
	Reward     float64  `json:"reward"`
	Advantage  *float64 `json:"advantage"` // nil: the algorithm has none
	Tokens     uint32   `json:"tokens"`    // of the completion
	Truncated  bool     `json:"truncated"`

	Outcome      string             `json:"outcome,omitempty"` // COMPLETED or TRUNCATED
	Metrics      map[string]float64 `json:"metrics,omitempty"`
	PromptTokens uint32             `json:"prompt_tokens,omitempty"`
	Turns        []Turn             `json:"turns,omitempty"`     // the prompt and the turns, if episodes may have several
	Times        *Times             `json:"times,omitempty"`     // nil: not known
	Spans        []Span             `json:"spans,omitempty"`     // weights that sampled the completion
	TokenIDs     []int32            `json:"token_ids,omitempty"` // the first tokens of the completion
	Logprobs     []float64          `json:"logprobs,omitempty"`  // of those, when they were sampled; 0 for tokens that were read
	Trained      [][2]int           `json:"trained,omitempty"`   // first and one past the last of those that are trained on
}

// Parent is the episode that opened a child session.
type Parent struct {
	Part  uint32 `json:"part"`
	Turn  uint32 `json:"turn"`  // after which the child began
	Child uint32 `json:"child"` // number of the child in the episode
}

// Turn is a run of tokens that the policy sampled or read. Start and End count from the first token
// of the prompt.
type Turn struct {
	Sampled  bool               `json:"sampled"`
	Start    uint32             `json:"start"`
	End      uint32             `json:"end"`
	Text     string             `json:"text,omitempty"`
	Messages []json.RawMessage  `json:"messages,omitempty"` // in the form of OpenAI's API; then Text is empty
	Reward   float64            `json:"reward,omitempty"`
	Metrics  map[string]float64 `json:"metrics,omitempty"`
}

// Times is the course of an episode; see rollout.trajectory.v1.EpisodeTimes.
type Times struct {
	BeganUnixMs uint64      `json:"began_unix_ms"`
	Turns       []TurnTimes `json:"turns"` // of the sampled turns
}

// TurnTimes are in milliseconds since the beginning of the episode.
type TurnTimes struct {
	AskedMs    uint32   `json:"asked_ms"`
	SampledMs  uint32   `json:"sampled_ms"`
	AnsweredMs uint32   `json:"answered_ms"`
	ToolMs     []uint32 `json:"tool_ms,omitempty"` // duration of each tool call
}

// Span names the weights of the tokens from Start to before End, counted in the completion.
type Span struct {
	Version uint64 `json:"version"`
	Start   uint32 `json:"start"`
	End     uint32 `json:"end"`
}

// Of joins the completions that the learner recorded with the times of their samples.
func Of(recorded []*learnerv1.Completion, samples []*bufferv1.SampleRef) []Completion {
	type key struct {
		epoch        uint32
		index        uint64
		sample, part uint32
	}
	times := map[key]*trajectoryv1.EpisodeTimes{}
	for _, s := range samples {
		if k := s.GetKey(); s.GetTimes() != nil {
			times[key{k.GetEpoch(), k.GetIndex(), k.GetSample(), k.GetPart()}] = s.GetTimes()
		}
	}
	out := make([]Completion, 0, len(recorded))
	for _, c := range recorded {
		made := Completion{
			Epoch: c.GetEpoch(), Index: c.GetIndex(), Sample: c.GetSample(), Part: c.GetPart(), Prompt: c.GetPrompt(), Completion: c.GetCompletion(),
			Reward: c.GetReward(), Advantage: c.Advantage, Tokens: c.GetTokens(), Truncated: c.GetTruncated(),
			Metrics: c.GetMetrics(), PromptTokens: c.GetPromptTokens(), Turns: turns(c.GetTurns()), TokenIDs: ids(c.GetTokenIds()),
			Times: timesOf(times[key{c.GetEpoch(), c.GetIndex(), c.GetSample(), c.GetPart()}]), Logprobs: logprobs(c.GetLogprobs()), Trained: runs(c.GetLossMask()),
		}
		if c.GetOutcome() != 0 {
			made.Outcome = strings.TrimPrefix(c.GetOutcome().String(), "OUTCOME_")
		}
		if p := c.GetParent(); p != nil {
			made.Parent = &Parent{Part: p.GetPart(), Turn: p.GetTurn(), Child: p.GetChild()}
		}
		for _, s := range c.GetVersionSpans() {
			made.Spans = append(made.Spans, Span{s.GetVersion(), s.GetStart(), s.GetEnd()})
		}
		out = append(out, made)
	}
	return out
}

func turns(of []*trajectoryv1.Turn) []Turn {
	var out []Turn
	for _, t := range of {
		turn := Turn{Sampled: t.GetSampled(), Start: t.GetStart(), End: t.GetEnd(), Text: t.GetText(), Reward: t.GetReward(), Metrics: t.GetMetrics()}
		for _, message := range t.GetMessages() {
			if json.Valid([]byte(message)) {
				turn.Messages = append(turn.Messages, json.RawMessage(message))
			}
		}
		out = append(out, turn)
	}
	return out
}

func timesOf(of *trajectoryv1.EpisodeTimes) *Times {
	if of == nil {
		return nil
	}
	out := &Times{BeganUnixMs: of.GetBeganUnixMs()}
	for _, t := range of.GetTurns() {
		out.Turns = append(out.Turns, TurnTimes{t.GetAskedMs(), t.GetSampledMs(), t.GetAnsweredMs(), t.GetToolMs()})
	}
	return out
}

func ids(raw []byte) []int32 {
	var out []int32
	for ; len(raw) >= 4; raw = raw[4:] {
		out = append(out, int32(binary.LittleEndian.Uint32(raw)))
	}
	return out
}

// logprobs are rounded, because they are read by people, and finite, because JSON has no infinity.
func logprobs(raw []byte) []float64 {
	var out []float64
	for ; len(raw) >= 4; raw = raw[4:] {
		v := float64(math.Float32frombits(binary.LittleEndian.Uint32(raw)))
		if math.IsNaN(v) {
			v = 0
		}
		out = append(out, math.Round(1e4*min(max(v, -1e4), 1e4))/1e4)
	}
	return out
}

// runs are the runs of ones in a mask.
func runs(mask []byte) [][2]int {
	var out [][2]int
	for i, on := range mask {
		switch n := len(out); {
		case on == 0:
		case n > 0 && out[n-1][1] == i:
			out[n-1][1]++
		default:
			out = append(out, [2]int{i, i + 1})
		}
	}
	return out
}
