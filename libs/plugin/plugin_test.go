package plugin

import (
	"context"
	"errors"
	"testing"
	"time"

	pluginv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plugin/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A deadline that passes here first must not look like an error of the plugin.
func TestACallThatIsLateHereIsLateForItsCaller(t *testing.T) {
	late, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	fails := func(ctx context.Context, _ any) (any, error) {
		return nil, statusOf(errors.Join(errors.New("asked the judge"), ctx.Err()), "REWARD_RAISED")
	}
	for ctx, want := range map[context.Context]codes.Code{late: codes.DeadlineExceeded, t.Context(): codes.FailedPrecondition} {
		if _, err := ended(ctx, nil, nil, fails); status.Code(err) != want {
			t.Errorf("%v, want %v", err, want)
		}
	}
}

// The seed is that of `rollout.environment.Task` in Python, so that a game begins alike in both.
func TestTheSeedOfATaskIsThatOfPython(t *testing.T) {
	task := taskOf(&pluginv1.EnvironmentTask{RowJson: []byte(`{"a": 1}`), Row: 3})
	if want := uint64(8104640996794592654); task.Seed != want {
		t.Errorf("seed %d, want %d", task.Seed, want)
	}
}

func TestArgumentsOfAToolAreChecked(t *testing.T) {
	const schema = `{"type": "object", "required": ["a"]}`
	for data, want := range map[string]string{
		`{"a": 1}`:   "",
		`{}`:         `missing argument "a"`,
		``:           `missing argument "a"`,
		`{"a": "x"}`: "the arguments do not fit the tool: json: cannot unmarshal string into Go struct field .A of type int",
		`[]`:         "the arguments are not a JSON object: json: cannot unmarshal array into Go value of type map[string]json.RawMessage",
	} {
		var into struct{ A int }
		got := ""
		if err := decode([]byte(data), schema, &into); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", data, got, want)
		}
	}
}
