package worker_test

import (
	"encoding/json"
	"os"
	"slices"
	"testing"

	"github.com/rollout-rl/rollout/libs/worker"
)

// Python has the same table (python/tests/worker/test_kinds.py).
func TestKindsAreThoseOfPython(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../schemas/golden/worker_kinds.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden, got []string
	if err := json.Unmarshal(text, &golden); err != nil {
		t.Fatal(err)
	}
	for _, kind := range worker.Kinds {
		got = append(got, kind.Name)
	}
	if slices.Sort(got); !slices.Equal(got, golden) {
		t.Errorf("kinds %q, want %q", got, golden)
	}
}
