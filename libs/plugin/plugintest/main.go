// Command plugintest is the sidecar of the conformance suite (rollout_testing.plugintest), written
// with the Go SDK. Its plugins do what those of the suite do.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"time"

	"github.com/rollout-rl/rollout/libs/plugin"
)

func main() {
	environment := plugin.Environment("Echo", func(json.RawMessage) (plugin.Episode, error) { return &echo{}, nil })
	if len(os.Args) > 1 { // in a run
		environment = plugin.Environment("Play", func(json.RawMessage) (plugin.Episode, error) { return &play{}, nil })
	}
	plugin.Main("1.0.0",
		plugin.Reward("score", score),
		plugin.Reward("digit_share", digitShare),
		plugin.Evaluation("slow", func(_ context.Context, samples []plugin.Sample) ([]plugin.Score, error) {
			scores := make([]plugin.Score, len(samples))
			for i := range scores {
				scores[i].Reward = 1
			}
			return scores, nil
		}),
		plugin.Tool("add", "Add two numbers.", `{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}`,
			func(_ context.Context, _ plugin.ToolCall, numbers struct{ A, B int }) (string, error) {
				return strconv.Itoa(numbers.A + numbers.B), busy()
			}),
		plugin.DataSource("numbers", func(_ context.Context, split string, offset uint64, limit int) ([]json.RawMessage, error) {
			if split == "raise" {
				return nil, errors.New("no such split")
			}
			var rows []json.RawMessage
			for number := offset; number < 5 && len(rows) < limit; number++ {
				rows = append(rows, json.RawMessage(fmt.Sprintf(`{"number": %d}`, number)))
			}
			return rows, nil
		}),
		environment,
	)
}

func score(_ context.Context, samples []plugin.Sample) ([]plugin.Score, error) {
	scores := make([]plugin.Score, len(samples))
	for i, sample := range samples {
		var row struct{ Do string }
		if err := json.Unmarshal(sample.Row, &row); err != nil {
			return nil, err
		}
		scores[i].Reward = float64(len(sample.Prompt) + len(sample.Completion))
		switch row.Do {
		case "raise":
			return nil, errors.New("bad sample")
		case "panic":
			panic("bad sample")
		case "exit":
			os.Exit(3)
		case "short":
			return scores[:1], nil
		case "nan":
			scores[i].Reward = math.NaN()
		case "hang":
			time.Sleep(3 * time.Second)
		case "parts":
			scores[i] = plugin.Score{
				Reward: math.Copysign(0, -1), Metrics: map[string]float64{"length": 2}, TokenRewards: []float64{0.5, 0.5},
				Steps: []plugin.Step{{Start: 0, End: 1, Reward: 0.25}},
			}
		}
	}
	return scores, nil
}

// busy takes 0.2 s if the program has an argument. The file that it names has the process id
// meanwhile, so that a test can kill the process during a call.
func busy() error {
	if len(os.Args) < 2 {
		return nil
	}
	if err := os.WriteFile(os.Args[1], []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
		return err
	}
	time.Sleep(200 * time.Millisecond)
	return nil
}

// digitShare is the reward of the end-to-end tests (e2e/reward.py).
func digitShare(_ context.Context, samples []plugin.Sample) ([]plugin.Score, error) {
	if err := busy(); err != nil {
		return nil, err
	}
	scores := make([]plugin.Score, len(samples))
	for i, sample := range samples {
		digits := 0
		for _, c := range sample.Completion {
			if '0' <= c && c <= '9' {
				digits++
			}
		}
		scores[i].Reward = float64(digits) / float64(max(1, len([]rune(sample.Completion))))
	}
	return scores, nil
}

// echo ends an episode at the answer `stop`.
type echo struct {
	Turns int `json:"turns"`
}

func (e *echo) Reset(_ context.Context, task plugin.Task) (plugin.Observation, error) {
	if string(task.Row) == "[]" {
		return plugin.Observation{}, &plugin.Error{Reason: "ROW_INVALID", Message: "not an object"}
	}
	return plugin.Observation{Text: task.Key, TokenIDs: []int32{int32(task.Number)}}, nil
}

func (e *echo) Step(_ context.Context, turn plugin.Turn) (plugin.Answer, error) {
	if turn.Text == "fail" {
		return nil, errors.New("the simulator is down")
	}
	e.Turns++
	if turn.Text != "stop" {
		return plugin.Observation{Text: turn.Text, TokenIDs: turn.TokenIDs}, nil
	}
	result := plugin.Result{Reward: float64(e.Turns), Metrics: map[string]float64{"sample": float64(turn.Sample)}}
	if turn.Truncated {
		result.Outcome = plugin.Truncated
	}
	return result, nil
}

func (e *echo) Save() (json.RawMessage, error)   { return json.Marshal(e) }
func (e *echo) Load(state json.RawMessage) error { return json.Unmarshal(state, e) }

// play has two to five turns. What it observes and its reward depend on all of them.
type play struct {
	Digits int    `json:"digits"`
	Turns  uint32 `json:"turns"`
}

func (p *play) Reset(_ context.Context, task plugin.Task) (plugin.Observation, error) {
	var row struct{ Prompt string }
	err := json.Unmarshal(task.Row, &row)
	return plugin.Observation{Text: row.Prompt}, err
}

func (p *play) Step(_ context.Context, turn plugin.Turn) (plugin.Answer, error) {
	if turn.Number != p.Turns {
		return nil, fmt.Errorf("turn %d follows %d turns", turn.Number, p.Turns)
	}
	p.Turns++
	for _, c := range turn.Text {
		if '0' <= c && c <= '9' {
			p.Digits++
		}
	}
	if err := busy(); err != nil {
		return nil, err
	}
	if turn.Number == 1+turn.Sample+uint32(turn.Task.Number%2) {
		return plugin.Result{Reward: float64(p.Digits), Metrics: map[string]float64{"turns": float64(p.Turns)}}, nil
	}
	return plugin.Observation{Text: fmt.Sprintf("(%d)", p.Digits), Reward: float64(len(turn.Text)) / 8}, nil
}

func (p *play) Save() (json.RawMessage, error)   { return json.Marshal(p) }
func (p *play) Load(state json.RawMessage) error { return json.Unmarshal(state, p) }
