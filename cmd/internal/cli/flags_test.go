package cli

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

func TestAWorkerRunsInTheEnvironmentOfItsEngine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		flag, python string
		want         []string
	}{
		{"", ".tools/vllm/bin/python", []string{"/base/.tools/vllm/bin/python", "-P", "-m", "rollout_workers"}},
		{"", "/opt/python", []string{"/opt/python", "-P", "-m", "rollout_workers"}},
		{"my worker", "/opt/python", []string{"my", "worker"}},
		{"my worker", "", []string{"my", "worker"}},
	} {
		flag := WorkerFlag{command: c.flag}
		if got := flag.For(&configv1.EngineConfig{Python: proto.String(c.python)}, "/base"); !slices.Equal(got, c.want) {
			t.Errorf("%q, %q: %q, want %q", c.flag, c.python, got, c.want)
		}
	}
}
