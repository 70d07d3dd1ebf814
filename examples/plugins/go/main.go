// Command words is a sidecar with a reward, an environment, and a tool. See docs/plugins.md.
//
//	go build -o examples/plugins/go/words ./examples/plugins/go    # in a checkout
//	go get github.com/rollout-rl/rollout/libs@latest               # in your own module
package main

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"

	"github.com/rollout-rl/rollout/libs/plugin"
)

func main() {
	plugin.Main("1.0.0",
		plugin.Reward("digits", digits),
		plugin.Environment("guess", func(arguments json.RawMessage) (plugin.Episode, error) {
			game := &guess{Guesses: 3}
			return game, json.Unmarshal(arguments, game)
		}),
		plugin.Tool("add", "Add two numbers.",
			`{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}`,
			func(_ context.Context, _ plugin.ToolCall, numbers struct{ A, B int }) (string, error) {
				return strconv.Itoa(numbers.A + numbers.B), nil
			}),
	)
}

// digits is the share of digits in a completion.
func digits(_ context.Context, samples []plugin.Sample) ([]plugin.Score, error) {
	scores := make([]plugin.Score, len(samples))
	for i, sample := range samples {
		all := []rune(sample.Completion)
		found := len(all) - len([]rune(strings.Map(noDigit, sample.Completion)))
		scores[i] = plugin.Score{Reward: float64(found) / float64(max(1, len(all))), Metrics: map[string]float64{"digits": float64(found)}}
	}
	return scores, nil
}

func noDigit(r rune) rune {
	if r >= '0' && r <= '9' {
		return -1
	}
	return r
}

// guess is a game: find the row's number. Its state can be saved, because it is in its fields.
type guess struct {
	Guesses uint32 `json:"guesses"`
	Number  int    `json:"number"`
}

func (g *guess) Reset(_ context.Context, task plugin.Task) (plugin.Observation, error) {
	var row struct{ Number *int }
	if err := json.Unmarshal(task.Row, &row); err != nil || row.Number == nil {
		return plugin.Observation{}, &plugin.Error{Reason: "ROW_INVALID", Message: "the row has no number"}
	}
	g.Number = *row.Number
	return plugin.Observation{Text: "guess 1-5:"}, nil
}

func (g *guess) Step(_ context.Context, turn plugin.Turn) (plugin.Answer, error) {
	said, err := strconv.Atoi(turn.Text)
	if err != nil || said == g.Number || turn.Number+1 == g.Guesses {
		won := 0.0
		if err == nil && said == g.Number {
			won = 1
		}
		return plugin.Result{Reward: won, Metrics: map[string]float64{"guesses": float64(turn.Number + 1)}}, nil
	}
	if said < g.Number {
		return plugin.Observation{Text: "higher:"}, nil
	}
	return plugin.Observation{Text: "lower:"}, nil
}

func (g *guess) Save() (json.RawMessage, error)   { return json.Marshal(g) }
func (g *guess) Load(state json.RawMessage) error { return json.Unmarshal(state, g) }
